"""Health: which news condemns a device, and what brings it back."""
