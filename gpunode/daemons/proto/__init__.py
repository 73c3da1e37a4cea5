"""Generated messages of the CRI; fixtures/generate_protos.py makes them from cri.proto."""
