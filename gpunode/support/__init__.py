"""What goes into a support bundle, and what is taken out of it first. docs/doctor.md lists both."""
