"""The dense peaks of GPUs, in floating-point operations per second, as their makers give them.

A datasheet often shows twice the figure, "with sparsity": of a matrix in which half of the numbers
are zero. The figures here are without that, with sums in float32, as torch computes. What a maker
does not say is not here, nor is a variant of a device that has another chip or clock.
"""

from __future__ import annotations

import re

import torch

#: How float32 is multiplied on tensor cores, where torch is told to.
TF32 = "tf32"

_TERA = 1e12
_NAMES = {
    TF32: TF32,
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}

#: Words of a device's name that say nothing of its speed. HBM2e does: H100 80GB HBM2e is no SXM.
_NO_MATTER = re.compile(r"NVIDIA|GEFORCE|TESLA|AMD|INSTINCT|OAM|\d+G(I?B)?|HBM3E?")


def _tera(**figures: float) -> dict[str, float]:
    return {name: figure * _TERA for name, figure in figures.items()}


def _half(both: float, **others: float) -> dict[str, float]:
    """Return peaks of a device that multiplies both 16-bit formats at one speed."""
    return _tera(fp16=both, bf16=both, **others)


# NVIDIA V100 datasheet (2020), https://images.nvidia.com/content/technologies/volta/pdf/
# volta-v100-datasheet-update-us-1165301-r5.pdf. Tensor cores of float16 alone; no bf16.
_VOLTA = {
    "V100 SXM2": _tera(fp16=125.0, fp32=15.7, fp64=7.8),
    "V100 PCIE": _tera(fp16=112.0, fp32=14.0, fp64=7.0),
    "V100S PCIE": _tera(fp16=130.0, fp32=16.4, fp64=8.2),
}

# NVIDIA T4 datasheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/
# t4-tensor-core-datasheet-951643.pdf.
_TURING = {"T4": _tera(fp16=65.0, fp32=8.1)}

# Datasheets: A100 https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
# nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf; A10, A30 and A40 at
# https://www.nvidia.com/en-us/data-center/products/. The A10G of some clouds is another device.
_A100 = _half(312.0, tf32=156.0, fp32=19.5, fp64=19.5)
_AMPERE = {
    "A100 SXM4": _A100,
    "A100 PCIE": _A100,
    "A10": _half(125.0, tf32=62.5, fp32=31.2),
    "A30": _half(165.0, tf32=82.0, fp32=10.3, fp64=10.3),
    "A40": _half(149.7, tf32=74.8, fp32=37.4),
}

# Datasheets: L4 https://www.nvidia.com/en-us/data-center/l4/ (242 and 120 with sparsity); L40 and
# L40S https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413 (L40S: 733 and 366).
_ADA = {
    "L4": _half(121.0, tf32=60.0, fp32=30.3),
    "L40": _half(181.05, tf32=90.5, fp32=90.5),
    "L40S": _half(362.05, tf32=183.0, fp32=91.6),
}

# Datasheets: H100 https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306 (SXM 1,979
# and 989, NVL 1,671 and 835 with sparsity), PCIe in the first edition (1,513 and 756); H200
# https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/
# hpc-datasheet-sc23-h200; GH200 https://resources.nvidia.com/en-us-grace-cpu/
# grace-hopper-superchip (1,979 and 989). "H100" and "H200" alone are what SXM modules call
# themselves.
_HOPPER_SXM = _half(989.4, tf32=494.7, fp32=67.0, fp64=67.0)
_HOPPER_NVL = _half(835.5, tf32=417.5, fp32=60.0, fp64=60.0)
_HOPPER = {
    "H100": _HOPPER_SXM,
    "H100 SXM5": _HOPPER_SXM,
    "H100 PCIE": _half(756.5, tf32=378.0, fp32=51.0, fp64=51.0),
    "H100 NVL": _HOPPER_NVL,
    "H200": _HOPPER_SXM,
    "H200 NVL": _HOPPER_NVL,
    "GH200": _HOPPER_SXM,
}

# Blackwell datasheet, https://resources.nvidia.com/en-us-blackwell-architecture/datasheet: one GPU
# of HGX B200 (4,500 and 2,200 with sparsity), one of GB200 (5,000 and 2,500).
_BLACKWELL = {
    "B200": _half(2250.0, tf32=1100.0, fp32=75.0, fp64=37.0),
    "GB200": _half(2500.0, tf32=1250.0, fp32=80.0, fp64=40.0),
}

# Cores and boost clock in GHz, from https://www.nvidia.com/en-us/geforce/graphics-cards/compare/:
# two operations a cycle and core in float32. Tensor cores with sums in float32 make twice that in
# both 16-bit formats, and the same in TF32; float64 is a 64th: "NVIDIA Ampere GA102 GPU
# Architecture" (RTX 3090: 71 and 35.6), "NVIDIA Ada GPU Architecture" (RTX 4090: 165.2 and 82.6),
# "NVIDIA RTX Blackwell GPU Architecture" (RTX 5090: 209.5 and 104.8).
_GEFORCE = {
    "RTX 3060": (3584, 1.777),
    "RTX 3060 TI": (4864, 1.665),
    "RTX 3070": (5888, 1.725),
    "RTX 3070 TI": (6144, 1.77),
    "RTX 3080": (8704, 1.71),
    "RTX 3080 TI": (10240, 1.665),
    "RTX 3090": (10496, 1.695),
    "RTX 3090 TI": (10752, 1.86),
    "RTX 4060": (3072, 2.46),
    "RTX 4060 TI": (4352, 2.535),
    "RTX 4070": (5888, 2.475),
    "RTX 4070 SUPER": (7168, 2.475),
    "RTX 4070 TI": (7680, 2.61),
    "RTX 4070 TI SUPER": (8448, 2.61),
    "RTX 4080": (9728, 2.505),
    "RTX 4080 SUPER": (10240, 2.55),
    "RTX 4090": (16384, 2.52),
    "RTX 5060": (3840, 2.497),
    "RTX 5060 TI": (4608, 2.572),
    "RTX 5070": (6144, 2.512),
    "RTX 5070 TI": (8960, 2.452),
    "RTX 5080": (10752, 2.617),
    "RTX 5090": (21760, 2.407),
}

# AMD data sheets, matrix cores: MI200 https://www.amd.com/system/files/documents/
# amd-instinct-mi200-datasheet.pdf; torch sees the two dies of an MI250 and MI250X as two devices,
# so that each has half. MI300A, MI300X, MI325X:
# https://www.amd.com/en/products/accelerators/instinct/ mi300.html. "MI250X / MI250", as some
# drivers say, is not known.
_MI300X = _half(1307.4, tf32=653.7, fp32=163.4, fp64=163.4)
_AMD = {
    "MI210": _half(181.0, fp32=45.3, fp64=45.3),
    "MI250": _half(
        362.1 / 2,
        fp32=90.5 / 2,
        fp64=90.5 / 2,
    ),
    "MI250X": _half(
        383.0 / 2,
        fp32=95.7 / 2,
        fp64=95.7 / 2,
    ),
    "MI300A": _half(980.6, tf32=490.3, fp32=122.6, fp64=122.6),
    "MI300X": _MI300X,
    "MI325X": _MI300X,
}


def _geforce(cores: int, gigahertz: float) -> dict[str, float]:
    fp32 = 2 * cores * gigahertz / 1e3
    return _half(
        2 * fp32,
        tf32=fp32,
        fp32=fp32,
        fp64=fp32 / 64,
    )


_PEAKS: dict[str, dict[str, float]] = {
    **_VOLTA,
    **_TURING,
    **_AMPERE,
    **_ADA,
    **_HOPPER,
    **_BLACKWELL,
    **{name: _geforce(*figures) for name, figures in _GEFORCE.items()},
    **_AMD,
}


def device_peak(name: str, dtype: torch.dtype | str) -> float | None:
    """Return the dense peak of a device.

    Args:
        name: as ``torch.cuda.get_device_name()`` gives it.
        dtype: of the numbers that are multiplied; :data:`TF32` for float32 on tensor cores.

    Returns:
        Floating-point operations per second; None where the device, or this format on it, is not
        known.

    Source: beside each figure in this module.

    Example:
        >>> device_peak("NVIDIA A100-SXM4-80GB", torch.bfloat16)
        312000000000000.0
        >>> device_peak(
        ...     "NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16
        ... ) is None  # a part of one
        True
    """
    words = re.split(r"[\s\-]+", name.upper())
    kept = " ".join(word for word in words if word and not _NO_MATTER.fullmatch(word))
    return _PEAKS.get(kept, {}).get(_NAMES.get(dtype, ""))
