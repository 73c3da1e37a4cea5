"""The kubelet's device plugin protocol: deviceplugin.proto and what protoc makes of it."""
