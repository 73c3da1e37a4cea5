"""The GPUs that can be simulated: as NVML names them, how a usual server holds them, how MIG divides them.

Names, memory and links are as nvidia-smi shows them on such machines; MIG profiles and where they may lie are
NVIDIA's MIG user guide's, for the seven-slice GPUs after Hopper taken to be as on Hopper.
"""

from __future__ import annotations

from gpunode.dataclass import dataclass


@dataclass(frozen=True)
class Profile:
    """A MIG profile: `size` of the GPU's memory slots from one of `starts`, at most `limit` of them."""

    name: str
    size: int
    starts: tuple[int, ...]
    limit: int


@dataclass(frozen=True)
class Model:
    """One GPU model in its usual server.

    `count` is how many that server has, over `sockets` NUMA nodes, `per_switch` of them behind one PCIe
    switch. `links` is (how, NVLinks): ``nvswitch`` counts each GPU's links to switches, ``mesh`` and
    ``pairs`` those of each linked pair; `small` is what the board for four has instead. `mig` holds the sizes
    in the profiles' names, smallest first, `slots` the memory slots.
    """

    name: str
    memory_mib: int
    capability: str
    count: int = 8
    sockets: int = 2
    per_switch: int = 1
    links: tuple[str, int] = ("none", 0)
    small: tuple[str, int] = ("none", 0)
    mig: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        return 8 if len(self.mig) == 4 else 4

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """What MIG offers on it, largest first."""
        if not self.mig:
            return ()
        if self.slots == 4:
            one, two, four = self.mig
            return (
                Profile(f"4g.{four}gb", 4, (0,), 1),
                Profile(f"2g.{two}gb", 2, (0, 2), 2),
                Profile(f"1g.{one}gb", 1, (0, 1, 2, 3), 4),
                Profile(f"1g.{one}gb+me", 1, (0, 1, 2, 3), 1),
            )
        one, two, four, eight = self.mig
        return (
            Profile(f"7g.{eight}gb", 8, (0,), 1),
            Profile(f"4g.{four}gb", 4, (0,), 1),
            Profile(f"3g.{four}gb", 4, (0, 4), 2),
            Profile(f"2g.{two}gb", 2, (0, 2, 4), 3),
            Profile(f"1g.{two}gb", 2, (0, 2, 4, 6), 4),
            Profile(f"1g.{one}gb", 1, tuple(range(7)), 7),
            Profile(f"1g.{one}gb+me", 1, tuple(range(7)), 1),
        )


_H100_BOARD = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
_HGX = tuple(f"0000:{bus}:00.0" for bus in _H100_BOARD)
_GRACE = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")

MODELS = {
    "t4": Model("Tesla T4", 15360, "7.5", count=4),
    "dgx2": Model("Tesla V100-SXM3-32GB", 32768, "7.0", count=16, per_switch=2, links=("nvswitch", 6)),
    "a10": Model("NVIDIA A10", 23028, "8.6", count=4),
    "a30": Model("NVIDIA A30", 24576, "8.0", count=4, links=("pairs", 4), mig=(6, 12, 24)),
    "a40": Model("NVIDIA A40", 46068, "8.6", per_switch=2, links=("pairs", 4)),
    "a100": Model(
        *("NVIDIA A100-SXM4-40GB", 40960, "8.0"),
        per_switch=2,
        links=("nvswitch", 12),
        small=("mesh", 4),
        mig=(5, 10, 20, 40),
    ),
    "a100-80gb": Model(
        *("NVIDIA A100-SXM4-80GB", 81920, "8.0"),
        per_switch=2,
        links=("nvswitch", 12),
        small=("mesh", 4),
        mig=(10, 20, 40, 80),
    ),
    "a100-pcie": Model(
        *("NVIDIA A100-PCIE-40GB", 40960, "8.0"), per_switch=2, links=("pairs", 12), mig=(5, 10, 20, 40)
    ),
    "l4": Model("NVIDIA L4", 23034, "8.9"),
    "l40s": Model("NVIDIA L40S", 46068, "8.9", per_switch=4),
    "h100": Model(
        *("NVIDIA H100 80GB HBM3", 81559, "9.0"),
        links=("nvswitch", 18),
        small=("mesh", 6),
        mig=(10, 20, 40, 80),
        addresses=_HGX,
    ),
    "h100-pcie": Model(
        *("NVIDIA H100 PCIe", 81559, "9.0"), per_switch=2, links=("pairs", 12), mig=(10, 20, 40, 80)
    ),
    "h100-nvl": Model(
        *("NVIDIA H100 NVL", 95830, "9.0"), per_switch=2, links=("pairs", 12), mig=(12, 24, 47, 94)
    ),
    "h200": Model(
        *("NVIDIA H200", 143771, "9.0"), links=("nvswitch", 18), mig=(18, 35, 71, 141), addresses=_HGX
    ),
    "gh200": Model("NVIDIA GH200 480GB", 97871, "9.0", count=1, sockets=1, mig=(12, 24, 48, 96)),
    "b200": Model(
        *("NVIDIA B200", 183359, "10.0"), links=("nvswitch", 18), mig=(23, 45, 90, 180), addresses=_HGX
    ),
    "b300": Model(
        *("NVIDIA B300 SXM6 AC", 275040, "10.3"),
        links=("nvswitch", 18),
        mig=(34, 67, 135, 269),
        addresses=_HGX,
    ),
    "gb200": Model(
        *("NVIDIA GB200", 189471, "10.0"),
        count=4,
        links=("nvswitch", 18),
        mig=(23, 47, 93, 186),
        addresses=_GRACE,
    ),
    "gb300": Model(
        *("NVIDIA GB300", 284208, "10.3"),
        count=4,
        links=("nvswitch", 18),
        mig=(35, 70, 139, 278),
        addresses=_GRACE,
    ),
    "rtx-pro-6000": Model(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "12.0", per_switch=4, mig=(24, 48, 96)
    ),
    "rtx-4090": Model("NVIDIA GeForce RTX 4090", 24564, "8.9", count=2, sockets=1),
}
