"""NVIDIA's XIDs: what each means, and what brings a GPU back after it.

After the XID catalogue in NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors
with the Xid Catalog", October 2025: Ampere and newer), whose resolution buckets became classes:

- RESTART_APP -> application; RESTART_APP of a contained memory error -> restart-app; IGNORE -> ignore
- RESET_GPU -> reset; RESTART_BM and RESTART_VM -> reboot; CHECK_MECHANICALS -> hardware
- CONTACT_SUPPORT, the workflows, UPDATE_SWFW, CHECK_UVM and none -> by-driver: the driver's recovery action
  decides, as NVIDIA asks for. The codes that newer GPUs don't use have their older meaning.

Differences to NVIDIA's device plugin, which counts every XID but 13, 31, 43, 45, 68 and 109, are told in
docs/health.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

APPLICATION, IGNORE, RESTART_APP = "application", "ignore", "restart-app"
BY_DRIVER, RESET, REBOOT, HARDWARE = "by-driver", "reset", "reboot", "hardware"

NOT_COUNTED = frozenset({109})
"""Beside application and ignore. 109 needs a reset by the catalogue, but mostly a program has caused it and
NVIDIA's plugin ignores it; where the driver does ask for a reset, the recovery action tells."""

_ALL_INSTANCES = "*"


@dataclass(frozen=True)
class Xid:
    """One code. With `whole` it concerns the GPU, whichever MIG instance was told with it."""

    number: int
    meaning: str
    kind: str
    whole: bool = False

    @property
    def counts(self) -> bool:
        """Whether it makes a device unhealthy unless the settings say otherwise."""
        return self.kind not in (APPLICATION, IGNORE) and self.number not in NOT_COUNTED

    @property
    def text(self) -> str:
        """For people: ``XID 79: the GPU has fallen off the bus``."""
        return f"XID {self.number}: {self.meaning}" if self.meaning else f"XID {self.number}"


def xid(number: int) -> Xid:
    """The code as catalogued; one that isn't counts, and the driver decides when it is over."""
    return catalogue().get(number) or Xid(number, "", BY_DRIVER)


@cache
def catalogue() -> MappingProxyType[int, Xid]:
    """Every documented code."""
    found = {}
    for line in _TABLE.strip().splitlines():
        number, kind, meaning = line.split(" ", 2)
        name = kind.removesuffix(_ALL_INSTANCES)
        found[int(number)] = Xid(int(number), meaning, name, kind != name)
    return MappingProxyType(found)


# number, class (* for the whole GPU), meaning
_TABLE = """
1 by-driver invalid push buffer stream
2 by-driver invalid push buffer stream
3 by-driver invalid push buffer stream
4 by-driver invalid push buffer stream
5 by-driver the channel's buffer overflowed
6 by-driver invalid push buffer stream
7 by-driver invalid address of a push buffer
8 application a channel was idle for too long
9 by-driver the driver programmed the GPU wrongly
10 by-driver single step of the graphics engine
11 application invalid or corrupted push buffer stream
12 by-driver the driver could not handle an exception
13 application exception of the graphics engine
14 ignore a test of the error handling
15 by-driver a scan line did not come in time
16 by-driver the display hangs
17 by-driver wrong parameter
18 by-driver bus mastering is off
19 by-driver error of the display
20 by-driver invalid stream for the MPEG engine
21 by-driver invalid stream for the motion estimation engine
22 by-driver invalid stream for the video processor
23 by-driver logging of errors was switched on
24 by-driver a semaphore was not released in time
25 application invalid or illegal push buffer stream
26 by-driver the frame buffer did not answer
27 by-driver exception of the video processor
28 by-driver exception of the video processor
29 by-driver exception of the video processor
30 by-driver access to a bad address
31 application page fault in GPU memory
32 application corrupted push buffer stream
33 by-driver error of the security engine
34 by-driver exception of the video processor
35 by-driver exception of the video processor
36 by-driver exception of the video processor
37 ignore the context switch firmware met an unknown method
38 ignore the context switch firmware's watchdog ran out
39 application exception of copy engine 0
40 application exception of copy engine 1
41 application exception of copy engine 2
42 by-driver exception of the video processor
43 ignore a channel was reset after an error of its program
44 ignore fault during a context switch
45 application channels were removed after an earlier error
46 reset the GPU stopped processing
47 by-driver exception of video encoder 0
48 by-driver double-bit ECC error
49 by-driver clocks were fixed by configuration
50 by-driver clocks were changed after an error
51 by-driver the clocks' stress test failed
52 by-driver clocks were changed for the temperature
53 by-driver clocks were lowered for the temperature
54 hardware* auxiliary power is not connected
55 by-driver the temperature can't be read
56 by-driver error of the display
57 by-driver the memory's links could not be trained
58 by-driver error of the memory interface
59 by-driver error of the power management processor
60 application exception of the security engine
61 by-driver breakpoint of the power management processor
62 reset* the GPU's power management processor halted
63 ignore a memory row or page was marked for remapping or retirement
64 reset* a memory row or page could not be remapped or retired
65 by-driver exception of video encoder 1
66 ignore the driver accessed a register that it may not
67 ignore the driver violated a check of the firmware
68 application exception of video decoder 0
69 application class error of the graphics engine
70 application error of copy engine 3
71 application error of copy engine 4
72 application error of copy engine 5
73 by-driver exception of video encoder 2
74 reset* NVLink error
75 application error of copy engine 6
76 application error of copy engine 7
77 application error of copy engine 8
78 by-driver* a virtual GPU did not start
79 reboot* the GPU has fallen off the bus
80 application corrupted data was sent to the GPU
81 by-driver error of the VGA subsystem
82 application error of JPEG engine 0
83 application error of video decoder 1
84 application error of video decoder 2
85 application error of copy engine 9
86 application exception of the optical flow engine
87 by-driver report of the driver's telemetry
88 application error of video decoder 3
89 application error of video decoder 4
90 by-driver error of the level 2 cache
91 by-driver reserved
92 ignore many single-bit ECC errors
93 ignore the infoROM is being worn out
94 restart-app contained memory error
95 reset* uncontained memory error
96 application error of video decoder 5
97 application error of video decoder 6
98 application error of video decoder 7
99 application error of JPEG engine 1
100 application error of JPEG engine 2
101 application error of JPEG engine 3
102 application error of JPEG engine 4
103 application error of JPEG engine 5
104 application error of JPEG engine 6
105 application error of JPEG engine 7
106 ignore test message
107 ignore test message
108 ignore error of a remote NVLink address translation
109 reset a context switch took too long
110 reset* security fault
111 by-driver error of a bundle of methods
112 by-driver error of the display's supervisor
113 by-driver training of a DisplayPort link failed
114 by-driver the display ran out of data
115 by-driver error of the display's core channel
116 by-driver error of a display window
117 by-driver error of the display's cursor
118 by-driver error of a display head
119 reset* the GPU's system processor does not answer
120 reset* error of the GPU's system processor
121 ignore corrected error of the chip-to-chip link
122 by-driver the infoROM's flash can't be read
123 by-driver the infoROM's flash can't be written
124 by-driver the infoROM's flash can't be erased
125 by-driver error of the infoROM's file system
126 application error of copy engine 10
127 application error of copy engine 11
128 application error of copy engine 12
129 application error of copy engine 13
130 application error of copy engine 14
131 application error of copy engine 15
132 application error of copy engine 16
133 application error of copy engine 17
134 application error of copy engine 18
135 application error of copy engine 19
136 reset* training of a link failed
137 ignore an NVLink peer caused a privilege fault
138 by-driver error of the deep learning accelerator
139 application error of optical flow engine 1
140 reset* unrecovered ECC error
141 ignore error of CUDA's fast path
142 by-driver error of video encoder 3
143 reset* the GPU could not be initialised
144 by-driver* NVLink error (SAW)
145 by-driver* NVLink error (RLW)
146 by-driver* NVLink error (TLW)
147 by-driver* NVLink error (TREX)
148 by-driver* NVLink error (control)
149 by-driver* NVLink error (network interface)
150 by-driver* NVLink error (MSE)
151 reboot* rotation of the encryption keys failed
152 ignore error of the deep learning accelerator's memory unit
153 ignore the deep learning accelerator did not answer
154 ignore the driver asks for another recovery action
155 reset* NVLink error seen by software
156 reset* a resource was retired
157 ignore a resource could not be retired
158 reset* fatal time-out of the GPU
159 by-driver error of the coherent interconnect
160 ignore a memory channel was retired
161 ignore a memory channel could not be retired
162 ignore power smoothing was engaged again
163 ignore power smoothing was disengaged
164 ignore power smoothing nears the end of its life
165 ignore power smoothing has reached the end of its life
166 by-driver* NVLink carried data before its encryption was set up
167 by-driver* fatal time-out on PCIe
168 by-driver* the GPU has less memory than it should
169 by-driver* the security processor halted
170 by-driver* interrupt of the encrypted NVLink
171 by-driver uncorrectable error in memory (DRAM)
172 by-driver uncorrectable error in the chip (SRAM)
"""
