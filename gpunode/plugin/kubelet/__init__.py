"""The kubelet's side: one server and one registration per resource, and noticing when either is lost."""
