"""The kubelet's side: one server and one registration per resource, and detection of their loss."""
