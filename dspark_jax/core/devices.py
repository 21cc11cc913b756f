"""Peak figures of accelerators, as their makers publish them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One device as JAX counts them."""

    bf16_tflops: float
    """Dense matrix products in bfloat16."""
    hbm_gib: float
    hbm_gb_per_s: float
    link_gb_per_s: float
    """All links of a chip together."""


TPU_KINDS = {
    "v4": DeviceKind(bf16_tflops=275, hbm_gib=32, hbm_gb_per_s=1228, link_gb_per_s=300),
    "v5e": DeviceKind(bf16_tflops=197, hbm_gib=16, hbm_gb_per_s=819, link_gb_per_s=200),
    "v5p": DeviceKind(bf16_tflops=459, hbm_gib=95, hbm_gb_per_s=2765, link_gb_per_s=600),
    "v6e": DeviceKind(bf16_tflops=918, hbm_gib=32, hbm_gb_per_s=1640, link_gb_per_s=448),
    # A device is half a chip here.
    "tpu7x": DeviceKind(bf16_tflops=1153, hbm_gib=96, hbm_gb_per_s=3690, link_gb_per_s=600),
}
_A100 = DeviceKind(bf16_tflops=312, hbm_gib=80, hbm_gb_per_s=2039, link_gb_per_s=600)
_H100 = DeviceKind(bf16_tflops=989, hbm_gib=80, hbm_gb_per_s=3350, link_gb_per_s=900)
_H200 = DeviceKind(bf16_tflops=989, hbm_gib=141, hbm_gb_per_s=4800, link_gb_per_s=900)
# What JAX calls a device, in full: another form factor of the same chip has other figures.
_BY_JAX_NAME = {
    "TPU v4": TPU_KINDS["v4"],
    "TPU v5 lite": TPU_KINDS["v5e"],
    "TPU v5e": TPU_KINDS["v5e"],
    "TPU v5": TPU_KINDS["v5p"],
    "TPU v5p": TPU_KINDS["v5p"],
    "TPU v6 lite": TPU_KINDS["v6e"],
    "TPU v6e": TPU_KINDS["v6e"],
    "TPU7x": TPU_KINDS["tpu7x"],
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H200,
}


def device_kind(jax_name: str) -> DeviceKind | None:
    """The figures behind `device.device_kind`; None where they are not known (CPUs among others)."""
    return _BY_JAX_NAME.get(jax_name)
