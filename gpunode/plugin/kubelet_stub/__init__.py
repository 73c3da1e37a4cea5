"""A stand-in for the kubelet's device manager over real unix sockets, for the demo and the tests.

It is a stand-in because Debian has no kubelet package, and a real one needs a cluster's credentials and a
container runtime. It behaves as the real one (Kubernetes 1.36) was seen to, where a plugin can tell:

- at start it deletes every socket in its directory, then makes kubelet.sock; what it gave to containers it
  reads from its checkpoint;
- Register checks version and name, and dials the plugin back and asks for its options *before it answers*;
- then it opens ListAndWatch. Allocatable counts healthy devices, capacity all of them; when the stream ends
  capacity stays and allocatable is 0, and after five minutes the resource is dropped;
- the last plugin that registered a resource is allocated from; every plugin's list replaces the resource's
  devices, and the end of any one's stream marks them all unhealthy;
- for a container it asks for a preferred allocation where there is a choice (an error refuses the pod), then
  allocates, one resource and one container request at a time. It merges the answers, and gives a restarted
  container what it had without asking, unless a device has become unhealthy;
- sockets that appear in plugins_registry are asked what they are, and registered; one that is removed is
  deregistered. After a failed attempt on a path the next one waits, up to two minutes;
- PodResources (v1) tells who has what, and lists every healthy device as allocatable.
"""

from gpunode.plugin.kubelet_stub.allocations import AdmissionError, Allocation
from gpunode.plugin.kubelet_stub.plugin_watcher import Times
from gpunode.plugin.kubelet_stub.stub import KubeletStub, Registered

__all__ = ["AdmissionError", "Allocation", "KubeletStub", "Registered", "Times"]
