"""`serve.py`: a file of prompts in, a file of answers out, one JSON object a line."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import sys
import time
import traceback
from typing import Any

from tqdm import tqdm

from dspark_jax.core import storage
from dspark_jax.core.errors import InputError
from dspark_jax.core.file_stamps import replaced
from dspark_jax.engine.engine import EngineConfig
from dspark_jax.engine.load import LoadedEngine, load_engine
from dspark_jax.serving.config import ServeConfig
from dspark_jax.serving.decoding import decode, decoding_s
from dspark_jax.serving.input import Input, scan
from dspark_jax.serving.output import Output
from dspark_jax.serving.prometheus import metrics_server
from dspark_jax.serving.records import JobReader
from dspark_jax.serving.rejected import rejected_lines
from dspark_jax.serving.report import Report, engine_counters
from dspark_jax.serving.signals import Stop, StoppedAtOnce, stop_on_signals
from dspark_jax.serving.summary import Summary


class ExitCode(enum.IntEnum):
    """How a job ended, for whatever scheduled it; from STOPPED on, `--resume` goes on with it."""

    DONE = 0
    """All lines are answered."""
    SOME_REFUSED = 1
    """All lines are dealt with, but some were refused or failed; trying again changes nothing."""
    BAD_CONFIGURATION = 2
    """Nothing was done: flags, input or models need a correction."""
    STOPPED = 3
    """A signal stopped the job."""
    STORAGE_FAILED = 4
    """The disk is full, or reading or writing failed."""
    ENGINE_FAILED = 5
    """Anything else that was not foreseen."""


def serve_file(config: ServeConfig) -> ExitCode:
    """Answers a file; see `ServeConfig` and `ExitCode`.

    Raises:
      InputError: nothing could be answered with this configuration (BAD_CONFIGURATION).
    """
    with stop_on_signals(config.grace_s) as stop:
        try:
            return _serve(config, stop)
        except InputError:
            raise
        except StoppedAtOnce:
            code, reason = ExitCode.STOPPED, f"{stop.requested}: stopped at once"
        except OSError as error:
            code, reason = ExitCode.STORAGE_FAILED, f"reading or writing failed: {error}"
        except Exception:
            code, reason = ExitCode.ENGINE_FAILED, traceback.format_exc()
    print(f"{reason}\n{_resumable(config)}", file=sys.stderr)
    return code


def _serve(config: ServeConfig, stop: Stop) -> ExitCode:
    source = scan(config.input, longest_first=config.longest_first, max_new_tokens=config.max_new_tokens)
    started_s = time.perf_counter()
    loaded = load_engine(
        target=config.target,
        drafter=config.drafter,
        config=EngineConfig(
            slots=config.slots,
            max_context=config.max_context,
            policy=config.policy,
            dtype=config.dtype,
            tensor=config.tensor,
        ),
        check=config.self_check,
        thinking=config.thinking,
    )
    loaded.calibrate(config.sampling(loaded.target.generation), config.calibration)
    load_s = time.perf_counter() - started_s
    if changed := replaced(loaded.stamps):
        raise InputError(
            given=f"files that were replaced while they were read: {', '.join(changed)}",
            expected="a target and a drafter that stay as they are",
            fix="start the job again",
        )
    identity = _identity(config, source, loaded)
    output = Output(config.output, identity, resume=config.resume)
    if output.complete is not None:
        print(f"nothing left to do; answers: {config.output}")
        return ExitCode(output.complete["exit_code"])
    try:
        return _answer(config, source, loaded, output, stop, load_s=load_s, identity=identity)
    finally:
        output.close()


def _answer(
    config: ServeConfig,
    source: Input,
    loaded: LoadedEngine,
    output: Output,
    stop: Stop,
    *,
    load_s: float,
    identity: dict[str, Any],
) -> ExitCode:
    engine, summary = loaded.engine, Summary()
    with (
        rejected_lines(f"{config.output}.rejected.jsonl") as rejected,
        metrics_server(config.metrics_port, config.metrics_host, summary, engine),
        tqdm(total=_expected_records(config, source), initial=output.done_records, unit=" requests") as bar,
    ):

        def refuse(line_number: int, reason: str, line: bytes) -> None:
            tqdm.write(f"{config.input}:{line_number}: refused: {reason}", file=sys.stderr)
            rejected.add(line_number, reason, line)

        reader = JobReader(
            chat=loaded.chat,
            engine=engine,
            options=config.options(loaded.target.generation),
            eos_ids=frozenset(loaded.target.eos_ids),
            on_refused=refuse,
            is_done=output.is_done,
            shard=config.shard_numbers,
        )
        # Prompt shapes are known only as the lines come: their programs compile then, off the decoding clock.
        engine.warm_up((), draws=reader.options.draws)
        started_s = decoding_s(engine)
        with stop.gently():
            for job in decode(engine, reader.jobs(source.numbered_lines()), stop, summary):
                output.append(reader.record(job))
                _show(bar, summary, decoding_s(engine) - started_s)
    report = Report(
        summary=summary,
        block_len=engine.models.block_len,
        answered_before=output.done_records,
        refused=reader.refused,
        load_s=load_s,
        compile_s=engine.compile_s,
        decode_s=decoding_s(engine) - started_s,
        counters=engine_counters(engine),
        stopped_by=stop.requested,
        replaced_files=replaced(loaded.stamps),
    )
    if stop.requested:
        code = ExitCode.STOPPED
        output.close()
    else:
        incomplete = reader.refused or summary.failed or output.failed_before
        code = ExitCode.SOME_REFUSED if incomplete else ExitCode.DONE
        output.finish(config.order, {"exit_code": code.value, "refused": reader.refused})
    print(f"\n{report.as_text()}")
    if config.report is not None:
        text = json.dumps(report.as_json(exit_code=code.value, job=identity), indent=2)
        storage.write(config.report, [text.encode(), b"\n"])
    for name in report.replaced_files:
        print(f"{name} was replaced; these answers are of the file that was loaded", file=sys.stderr)
    if rejected.written:
        print(f"refused lines: {rejected.name}")
    print(_resumable(config) if stop.requested else f"answers: {config.output}")
    return code


def _identity(config: ServeConfig, source: Input, loaded: LoadedEngine) -> dict[str, Any]:
    """Everything that the answers depend on: two jobs that differ in any of it must not share an output."""
    options = dataclasses.asdict(config.options(loaded.target.generation))
    names = "max_context verify_tokens confidence_threshold scheduler dtype shard longest_first".split()
    return {
        "input_sha256": source.sha256,
        "input_bytes": source.size_bytes,
        "target": loaded.target.identity,
        "drafter": loaded.drafter_identity,
        "dspark_jax": importlib.metadata.version("dspark_jax"),
        **{name: getattr(config, name) for name in names},
        **options.pop("sampling"),
        **options,
    }


def _expected_records(config: ServeConfig, source: Input) -> int:
    """For the progress bar: exact unless lines ask for several answers, are refused, or are sharded."""
    return round(source.lines * config.n / config.shard_numbers[1])


def _show(bar: tqdm, summary: Summary, seconds: float) -> None:
    bar.set_postfix_str(
        f"{summary.all.tokens / seconds:.1f} tokens/s, accepted length {summary.all.accepted_length:.2f}, "
        f"{summary.mean_budget:.1f} rows/step",
        refresh=False,
    )
    bar.update()


def _resumable(config: ServeConfig) -> str:
    return f"the answers so far are in {config.output}.partial; --resume goes on with them"
