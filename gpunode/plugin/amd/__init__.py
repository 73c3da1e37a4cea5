"""AMD GPUs, from sysfs."""
