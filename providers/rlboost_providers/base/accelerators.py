"""Names of accelerators that clouds rent out, as SkyPilot's catalogues and ours write them.

Used to tell a misspelling from a GPU that is newer than this list; being in it says nothing about where, or
whether now, a machine has one.
"""

from __future__ import annotations

from collections.abc import Mapping

KNOWN_ACCELERATORS = (
    *("A10", "A10G", "A16", "A30", "A40", "A4000", "A5000", "A6000", "A4500"),
    *("A100", "A100-80GB", "A100-80GB-SXM", "A800"),
    *("B100", "B200", "B300", "GB200", "GB300", "GH200"),
    *("H20", "H100", "H100-SXM", "H100-NVL", "H100-MEGA-80GB", "H200", "H200-SXM", "H200-NVL", "H800"),
    *("K80", "M4000", "M60", "P4", "P4000", "P40", "P100"),
    *("L4", "L40", "L40S"),
    *("RTX3060", "RTX3070", "RTX3080", "RTX3090", "RTX4080", "RTX4090", "RTX5000-Ada", "RTX5080", "RTX5090"),
    *("RTX4000-Ada", "RTX6000", "RTX6000-Ada", "RTXA4000", "RTXA5000", "RTXA6000"),
    *("RTXPRO4500", "RTXPRO6000"),
    *("T4", "T4g", "V100", "V100-32GB"),
    *("Gaudi", "HL-205", "Inferentia", "Inferentia2", "Trainium", "Trainium2", "Trainium3"),
    *("MI25", "MI100", "MI200", "MI210", "MI250", "MI250X", "MI300X", "MI325X", "MI350X", "MI355X"),
)

MEMORY_GIB: Mapping[str, int] = {
    "A10": 24,
    "A10G": 24,
    "A30": 24,
    "A40": 48,
    "A6000": 48,
    "RTXA6000": 48,
    "RTX6000-Ada": 48,
    "A100": 40,
    "A100-80GB": 80,
    "A100-80GB-SXM": 80,
    "A800": 80,
    "B200": 180,
    "B300": 288,
    "GB200": 186,
    "GH200": 96,
    "RTXPRO6000": 96,
    "H20": 96,
    "H100": 80,
    "H100-SXM": 80,
    "H100-NVL": 94,
    "H100-MEGA-80GB": 80,
    "H800": 80,
    "H200": 141,
    "H200-SXM": 141,
    "H200-NVL": 141,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "T4": 16,
    "V100": 16,
    "V100-32GB": 32,
    "P100": 16,
    "RTX3090": 24,
    "RTX4090": 24,
    "RTX5090": 32,
}
"""Memory of one GPU, from NVIDIA's data sheets, in GiB as the driver counts it, within 3 %."""


def memory_bytes(accelerator: str | None) -> int | None:
    """Return the memory of one device of `accelerator`, such as H100:8; None where it is not listed."""
    gib = MEMORY_GIB.get((accelerator or "").partition(":")[0])
    return None if gib is None else gib * 2**30


BANDWIDTH_GB_PER_S: Mapping[str, float] = {
    "A10": 600,
    "A10G": 600,
    "A30": 933,
    "A40": 696,
    "A6000": 768,
    "RTXA6000": 768,
    "RTX6000-Ada": 960,
    "A100": 1_555,
    "A100-80GB": 2_039,
    "A100-80GB-SXM": 2_039,
    "A800": 2_039,
    "B200": 8_000,
    "B300": 8_000,
    "GB200": 8_000,
    "GH200": 4_000,
    "RTXPRO6000": 1_792,
    "H20": 4_000,
    "H100": 3_350,
    "H100-SXM": 3_350,
    "H100-NVL": 3_900,
    "H100-MEGA-80GB": 3_350,
    "H800": 3_350,
    "H200": 4_800,
    "H200-SXM": 4_800,
    "H200-NVL": 4_800,
    "L4": 300,
    "L40": 864,
    "L40S": 864,
    "T4": 320,
    "V100": 900,
    "V100-32GB": 900,
    "P100": 732,
    "RTX3090": 936,
    "RTX4090": 1_008,
    "RTX5090": 1_792,
}
"""Memory bandwidth of one GPU at its peak, from NVIDIA's data sheets, in GB per second."""


def bandwidth(accelerator: str) -> float:
    """Return the peak memory bandwidth of one device of `accelerator`, such as H100:8, in bytes per second;
    that of the slowest GPU in the list where it is not listed."""
    name = accelerator.partition(":")[0]
    return 1e9 * BANDWIDTH_GB_PER_S.get(name, min(BANDWIDTH_GB_PER_S.values()))
