"""Results of commands and their output formats: terminal, JSON, YAML, HTML, Prometheus."""
