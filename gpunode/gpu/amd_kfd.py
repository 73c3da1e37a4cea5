"""KFD, the compute side of amdgpu: its nodes, and how they are linked (kfd_topology.c)."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.dataclass import dataclass, field, replace
from gpunode.gpu.amd_sysfs import KFD, Place, listed, parse_properties, place_of, text_of
from gpunode.gpu.model import Inventory, Pair, Topology
from gpunode.host import Host

_XGMI = 11  # HSA_IOLINK_TYPE_XGMI; 2 is PCI Express
_SAME_NODE, _SYSTEM = 40, 50  # nvmlGpuTopologyLevel_t's words for it


@dataclass(frozen=True)
class KfdNode:
    """One compute node: a GPU or a partition. `links` has the kind of link and its width by node number."""

    number: int
    values: Mapping[str, int]
    memory_bytes: int = 0
    links: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Domain, bus and device of the GPU that it is, or belongs to."""
        location = self.values.get("location_id", 0)
        return self.values.get("domain", 0), location >> 8 & 0xFF, location >> 3 & 0x1F

    @property
    def partition(self) -> int:
        """Which partition it is; a partition takes the PCI function's three bits."""
        return self.values.get("location_id", 0) & 7

    @property
    def gfx(self) -> str:
        version = self.values.get("gfx_target_version", 0)
        return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}" if version else ""


def read_nodes(host: Host) -> dict[int, KfdNode]:
    """The compute nodes of GPUs, by number. Of a GPU's partitions only the first one's links are read: the
    others' lead along the same wires, and 64 partitions have 4000."""
    found: dict[int, KfdNode] = {}
    linked: set[Place] = set()
    for name in listed(host, f"{KFD}/nodes"):
        at = f"{KFD}/nodes/{name}"
        values = parse_properties(text_of(host, f"{at}/properties"))
        if name.isdecimal() and values.get("drm_render_minor", 0) > 0 and values.get("simd_count", 0) > 0:
            banks = (
                parse_properties(text_of(host, f"{at}/mem_banks/{bank}/properties"))
                for bank in listed(host, f"{at}/mem_banks")
            )
            memory = sum(bank.get("size_in_bytes", 0) for bank in banks)
            node = KfdNode(int(name), values, memory)
            if node.place not in linked:
                linked.add(node.place)
                node = replace(node, links=_links(host, at))
            found[node.number] = node
    return found


def _links(host: Host, at: str) -> dict[int, tuple[int, int]]:
    links: dict[int, tuple[int, int]] = {}
    for kind in ("p2p_links", "io_links"):  # a direct link says more than a way through the processor
        for name in listed(host, f"{at}/{kind}"):
            values = parse_properties(text_of(host, f"{at}/{kind}/{name}/properties"))
            if "node_to" in values and "type" in values:
                single = values.get("min_bandwidth", 0)
                width = values.get("max_bandwidth", 0) // single if single > 0 else 1
                links[values["node_to"]] = (values["type"], min(max(width, 1), 64))
    return links


def read_topology(inventory: Inventory, nodes: Mapping[int, KfdNode]) -> Topology:
    """XGMI links count as NVLinks do; without a link record two GPUs are as far apart as can be. Pure."""
    by_place: dict[Place, list[KfdNode]] = {}
    for node in nodes.values():
        by_place.setdefault(node.place, []).append(node)
    known = [(gpu, by_place.get(place_of(gpu.pci), [])) for gpu in inventory.gpus if not gpu.error]
    pairs = []
    for at, (one, mine) in enumerate(known):
        for other, theirs in known[at + 1 :]:
            links = _between(mine, theirs), _between(theirs, mine)
            near = one.numa is not None and one.numa == other.numa
            level = (_SAME_NODE if near else _SYSTEM) if all(links) else None
            xgmi = min((link[1] if link and link[0] == _XGMI else 0) for link in links)
            low, high = sorted((one.uuid, other.uuid))
            pairs.append(Pair(low, high, level, xgmi))
    return Topology(tuple(pairs))


def _between(mine: list[KfdNode], theirs: list[KfdNode]) -> tuple[int, int] | None:
    wanted = {node.number for node in theirs}
    return next((link for node in mine for to, link in node.links.items() if to in wanted), None)
