"""AMD GPUs: what sysfs tells of them, what they are advertised as, and what a container gets."""
