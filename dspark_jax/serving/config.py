"""The flags of `serve.py`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dspark_jax.core.errors import require
from dspark_jax.engine.load import SHIPPED
from dspark_jax.engine.requests import SamplingOptions
from dspark_jax.serving.options import AnswerOptions
from dspark_jax.speculation.schedule import Algorithm1, Lagged, Scheduler
from dspark_jax.speculation.verify_length import ConfidenceThreshold, FixedLength, FullBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Answer every prompt of a JSON lines file by speculative decoding, losslessly."""

    input: str
    """JSON lines, a path or a URL such as gs://bucket/file: "prompt" or "messages"; optional "id", "domain"
    and every option of docs/serving.md."""
    output: str
    """JSON lines: the answers. Grows as OUTPUT.partial and gets its name when it is complete; refused lines
    go to OUTPUT.rejected.jsonl."""
    resume: bool = False
    """Go on with a job that was stopped. The same command begins the job where there is none."""
    target: str = "smollm2-135m"
    """Target model: embedded name, .gguf file, Hugging Face directory or hub id."""
    drafter: str = SHIPPED
    """Drafter directory, "shipped", or "none" for plain decoding."""
    slots: int = 4
    """Requests decoded at the same time."""
    max_context: int = 1024
    """Longest prompt plus answer, in tokens."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    min_new_tokens: int = 0
    """Shortest answer, in tokens: stop tokens cannot be drawn before."""
    n: int = 1
    """Answers to each prompt; needs a temperature above 0."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; the text ends before them."""
    ignore_eos: bool = False
    """Go on past the target's end tokens."""
    logprobs: int | None = None
    """Report the target's log-probability of every token, and of so many alternatives."""
    temperature: float | None = None
    """0 is greedy. By default what the target's generation_config recommends, else 0."""
    top_k: int | None = None
    """Draw among the k most likely tokens; 0 is off. Default: as recommended, else off."""
    top_p: float | None = None
    """Draw among the fewest tokens of this probability; 1 is off. Default: as recommended, else off."""
    min_p: float | None = None
    """Drop tokens below this share of the likeliest; 0 is off. Default: as recommended, else off."""
    seed: int = 0
    """With a line's id it decides the line's draws."""
    verify_tokens: int | None = None
    """Verify this many drafted tokens in every round."""
    confidence_threshold: float | None = None
    """Verify up to the first drafted token with a confidence below this."""
    scheduler: Literal["lagged", "algorithm1", "full"] = "lagged"
    """Who chooses how much is verified, where no rule above does: "lagged" from the confidence of earlier
    rounds and measured costs, "algorithm1" from the present one's, "full" nobody: all of every block, which
    is also what drafters without a confidence head get. The first run on a machine measures."""
    calibration: Path | None = None
    """File of `dspark calibrate`; by default the one that lies beside the drafter, if it fits."""
    order: Literal["input", "completion"] = "input"
    """Order of the answers in OUTPUT."""
    longest_first: bool = False
    """Begin with the lines that may take longest, so that the last ones do not run alone. Takes 24 bytes of
    memory a line."""
    shard: str | None = None
    """i/n: answer only part i of n, from 0; the parts are the same wherever they are worked out."""
    grace_s: float = 30.0
    """After SIGTERM or SIGINT, requests that are being decoded have so many seconds to finish."""
    report: str | None = None
    """Write the figures of the run there, as JSON."""
    metrics_port: int | None = None
    """Serve figures for Prometheus at this port while the job runs."""
    metrics_host: str = "127.0.0.1"
    """Address for --metrics-port; nobody but this machine can reach the default."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which the models run."""
    tensor: int = 1
    """Devices that share every layer of target and drafter (tensor parallelism)."""
    thinking: bool = False
    """Let targets think whose chat template leaves the choice."""
    self_check: bool = True
    """Try whether the drafter fits the target, and stop if it does not."""

    def __post_init__(self):
        rules = ("verify_tokens", "confidence_threshold")
        given = [name for name in rules if getattr(self, name) is not None]
        require(
            len(given) <= 1,
            given=" and ".join(given),
            expected="at most one rule for how much is verified",
            fix="leave the others out",
        )
        require(
            self.max_new_tokens >= 1,
            given=f"max_new_tokens={self.max_new_tokens}",
            expected="at least 1",
            fix="raise max_new_tokens",
        )
        require(
            self.grace_s >= 0,
            given=f"grace_s={self.grace_s}",
            expected="0 seconds or more",
            fix="correct grace_s",
        )
        _ = self.shard_numbers

    @property
    def shard_numbers(self) -> tuple[int, int]:
        """(part, parts) of `shard`; (0, 1) for the whole input."""
        if self.shard is None:
            return 0, 1
        match = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        part, parts = map(int, match.groups()) if match else (0, 0)
        require(
            part < parts,
            given=f"shard {self.shard!r}",
            expected="i/n with 0 <= i < n, such as 0/4",
            fix="correct --shard",
        )
        return part, parts

    @property
    def policy(self) -> Scheduler:
        """Who decides how many drafted tokens of a block are verified."""
        if self.verify_tokens is not None:
            return FixedLength(length=self.verify_tokens)
        if self.confidence_threshold is not None:
            return ConfidenceThreshold(threshold=self.confidence_threshold)
        return {"lagged": Lagged(), "algorithm1": Algorithm1(), "full": FullBlock()}[self.scheduler]

    def sampling(self, generation: Mapping[str, Any]) -> SamplingOptions:
        """How tokens of a line are drawn that says nothing else.

        Args:
          generation: fields of the target's generation_config.json; they count if it recommends sampling.
        """
        options: dict[str, Any] = {"temperature": 0.0}
        if generation.get("do_sample"):
            options = {"temperature": 1.0, **generation}
        options |= {name: value for name, value in vars(self).items() if value is not None}
        names = {field.name for field in dataclasses.fields(SamplingOptions)}
        return SamplingOptions(**{name: options[name] for name in names if options.get(name) is not None})

    def options(self, generation: Mapping[str, Any]) -> AnswerOptions:
        """How a line is answered that says nothing else; `generation` as in `sampling`."""
        own = {field.name for field in dataclasses.fields(AnswerOptions)} & set(vars(self))
        return AnswerOptions(
            sampling=self.sampling(generation), **{name: getattr(self, name) for name in own}
        )
