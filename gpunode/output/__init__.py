"""What a command returns and how it is printed: terminal, JSON, YAML, HTML, Prometheus."""
