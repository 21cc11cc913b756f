"""Which drafter a configuration describes: the one place that knows all of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.drafters.config import DSparkConfig, Eagle3Config, MTPConfig
from dspark_jax.drafters.contract import Drafter
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.drafters.eagle3 import Eagle3
from dspark_jax.drafters.mtp import MTP

DrafterConfig = DSparkConfig | Eagle3Config | MTPConfig

DRAFTERS: dict[type, Any] = {DSparkConfig: DSpark, Eagle3Config: Eagle3, MTPConfig: MTP}
"""Configuration type -> drafter class, called with (configuration, dtype)."""


def make_drafter(config: DrafterConfig, dtype: DTypeLike = jnp.float32) -> Drafter:
    """The drafter that a configuration describes.

    Args:
      config: its dimensions.
      dtype: dtype in which matrix products read their inputs, and of the context's keys and values.
    """
    return DRAFTERS[type(config)](config, dtype)
