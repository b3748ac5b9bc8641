"""Start of a training run: in this process, in new processes on this machine, or on the hosts of a lab."""

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch

from penstock import errors
from penstock.cluster.lab import Lab, lab_session, read_lab
from penstock.cluster.output import EndTogether, OutputLine, print_line
from penstock.deploy.run_options import ModelCall, RunOptions, Trace
from penstock.errors import DataError, OutOfMemory, PenstockError, RunError, UsageError
from penstock.files import written_whole
from penstock.group.addresses import BIND, free_port
from penstock.group.entry import join_torchrun, meeting_place, under_torchrun
from penstock.group.launcher import LocalWorkers, WorkerExit, module_command, module_path
from penstock.group.world import World
from penstock.recipes.data_formats import make_task
from penstock.recipes.images import on_every_rank, without_traceback
from penstock.recipes.loop import TrainingLoop
from penstock.recipes.metrics import FitResult, check_new, sole_run
from penstock.recipes.settings import FitSettings, num_processes, plan_of, survival_options, write_settings
from penstock.recipes.tasks import Task
from penstock.resources import is_out_of_memory, num_killed
from penstock.runtime.registry import parse_runtime
from penstock.spec.plan import Plan
from penstock.terminal.progress import working
from penstock.text import note
from penstock.train.arrangement import TrainOptions
from penstock.train.training_pipeline import TrainingPipeline
from penstock.wire import FEEDER

WORKER = "penstock.recipes.training_worker"
_NUM_SHOWN = 10  # class names
_POLL_S = 0.1
_GRACE_S = 12.0  # grace period for the other processes to detect a failure and report its reason


def fit(settings: FitSettings, cluster: Path | None = None) -> FitResult:
    """Train a model by name on data by name, and return the result.

    Under torchrun all existing processes call this. Otherwise this starts as many processes as stages and replicas
    need, or with `cluster` one process on each host of a lab.

    Example:
        result = fit(FitSettings(model="timm:vit_tiny_patch16_224,img_size=8,patch_size=2", data="digits", stages=2))
        print(result.epochs[-1].accuracy)

    Raises `UsageError` for settings, names and data that do not match, `RunError` if training fails and `DeviceLost` if
    a process is lost.
    """
    if cluster is not None:
        if under_torchrun():
            raise UsageError("--cluster starts its processes itself; use it without torchrun")
        with lab_session(read_lab(cluster)) as lab:
            return fit_apart(settings, lab=lab)
    if settings.join is None and under_torchrun():
        _check_enough(settings, int(os.environ["WORLD_SIZE"]))
    if settings.join is not None or under_torchrun() or num_processes(settings, plan_of(settings)) == 1:
        return fit_here(settings)
    return fit_apart(settings)


def fit_here(settings: FitSettings, *, holds_folder: bool = False) -> FitResult:
    """Train in the existing processes: this process, or all that torchrun started.

    With `holds_folder` the parent process holds the folder's lock, otherwise the first process takes the lock. Raises
    as `fit` does.
    """
    starts = under_torchrun() and settings.join is None
    world = join_torchrun(again=settings.on_loss != "stop") if starts else None
    with contextlib.ExitStack() as held:
        if world is not None:
            held.enter_context(world)
        first = settings.join is None and (world is None or world.rank == FEEDER)
        if first and not holds_folder:
            held.enter_context(sole_run(settings.folder))
            check_new(settings)
        with working("preparing model and data", shown=first):
            task = make_task(settings, partial(on_every_rank, settings, world))
        for text in task.notes if first else ():
            note(text)
        with make_pipeline(settings, task, world) as pipe:
            pipe.model_name = settings.model
            if first and settings.on_loss != "stop" and pipe.joins_at is not None:
                note(f"further processes can join with the same command and --join {pipe.joins_at}")
            try:
                run = TrainingLoop(settings, task, pipe)
                for text in _about(task, settings) if first and not settings.resume else ():
                    note(text)
                return run.run()
            except DataError as error:
                raise without_traceback(error) from error


def _about(task: Task, settings: FitSettings) -> Iterator[str]:
    """Yield what a user checks before a run: new tensors, rows and classes."""
    if task.new_tensors:
        yield f"not in the given weights, newly initialized: {', '.join(task.new_tensors)}"
    rows = f"rows of {settings.length} tokens" if task.unit == "tokens" else task.unit
    text = f"{len(task.training)} {rows} to train on, {len(task.validation)} for validation"  # type: ignore[arg-type]
    if task.classes:
        more = f" and {len(task.classes) - _NUM_SHOWN} more" if len(task.classes) > _NUM_SHOWN else ""
        text += f"; {len(task.classes)} classes: {', '.join(task.classes[:_NUM_SHOWN])}{more}"
    yield text


def make_pipeline(settings: FitSettings, task: Task, world: World | None) -> TrainingPipeline:
    """Create the pipeline of a task's model with these settings."""
    plan = plan_of(settings)
    one = 1 if world is None and plan is None and settings.join is None and settings.cuts is None else None
    args, kwargs = task.example
    call = ModelCall(model=task.module, args=args, kwargs=kwargs, dynamic=task.dynamic, weights=task.weights)
    cut = dataclasses.replace(settings.cut_options, stages=settings.stages or one, plan=plan)
    run = RunOptions(
        threads=settings.threads or (world.cores if world else None),
        device=settings.device,
        runtime=parse_runtime(settings.runtime),
        trace=None if settings.trace is None else Trace(settings.trace, profiler=settings.torch_profiler),
        on_loss=survival_options(settings, first=world is None or world.rank == FEEDER),
    )
    options = TrainOptions(
        replicas=settings.replicas,
        schedule=settings.schedule,
        microbatches=settings.microbatches,
        seed=settings.seed,
        autocast=torch.bfloat16 if settings.autocast else None,
        checkpointing=settings.checkpointing,
    )
    return TrainingPipeline(call, cut, run, options, world)


def _check_enough(settings: FitSettings, num_started: int) -> None:
    """Raise `UsageError` if fewer devices were started than requested."""
    if settings.processes is not None and settings.processes > num_started:
        raise UsageError(
            f"--processes needs {settings.processes} processes; got {num_started}; start one for each, or leave it out"
        )


def fit_apart(settings: FitSettings, *, lab: Lab | None = None) -> FitResult:
    """Train in separate processes, which have exited when this returns.

    Raises as `fit` does, and `OutOfMemory` naming the process or host that ran out of memory.
    """
    plan = plan_of(settings)  # raises errors in the plan before any process is started
    folder = settings.folder
    with sole_run(folder):
        check_new(settings)  # before any file is written, so that an error changes nothing
        file, result = folder / "asked.json", folder / "result.json"
        try:
            write_settings(settings, file)
            result.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(
                f"the folder {folder} cannot be written ({error.strerror}); choose another --output"
            ) from None
        problem: RunError | None = None
        try:
            problem = _run_local(settings, plan, file) if lab is None else _run_in_lab(settings, plan, file, lab)
        finally:
            file.unlink(missing_ok=True)
        return _read_result(result, problem)


def write_result(path: Path, found: FitResult | BaseException) -> None:
    """Write the result of a run, or its error, for the process that started it.

    Raises `RunError` if the disk has no space for the file.
    """
    try:
        with written_whole(path) as file:
            file.write(_result(found))
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); free space and continue with --resume") from None


def _result(found: FitResult | BaseException) -> bytes:
    if isinstance(found, FitResult):
        return msgspec.json.format(msgspec.json.encode(found)) + b"\n"
    kind = type(found).__name__ if isinstance(found, PenstockError) else "RunError"
    kind = OutOfMemory.__name__ if is_out_of_memory(found) else kind
    text = str(found) if isinstance(found, PenstockError) else f"{type(found).__name__}: {found}"
    return json.dumps({"failed": kind, "message": (text.splitlines() or [kind])[0]}).encode()


def _read_result(path: Path, problem: RunError | None) -> FitResult:
    """Read the result of the first process; raises its error, or the error that this process observed."""
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
        if "failed" not in document:
            return msgspec.convert(document, FitResult)
        path.unlink()
        kind = getattr(errors, document["failed"])
        # this process knows better which rank ran out of memory than the ranks that only lost it
        raise problem if isinstance(problem, OutOfMemory) else kind(document["message"])
    raise problem or RunError("the first process exited without a result; its output above has the reason")


def _run_local(settings: FitSettings, plan: Plan | None, file: Path) -> RunError | None:
    """Run on this machine; return the error that this process observed, if any."""
    count = num_processes(settings, plan)
    address, folder = meeting_place()
    env = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port(address)),
        BIND: address,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    if count > 1:
        env["OMP_NUM_THREADS"] = "1"
    arguments = [[str(file), "--rank", str(rank)] for rank in range(count)]
    for rank, name in enumerate(plan.devices if plan is not None else ()):
        arguments[rank] += ["--host", name]  # processes here represent the plan's devices, in order
    workers = LocalWorkers(WORKER, arguments, env)
    try:
        return _watch(workers, outlives=settings.on_loss != "stop")
    finally:
        workers.stop(0.0)
        if folder is not None:
            folder.close()


def _watch(workers: LocalWorkers, *, outlives: bool, grace_s: float = _GRACE_S) -> RunError | None:
    """Wait for all processes to exit; if the run `outlives` lost processes, only the first one's exit ends the run."""
    running = dict(enumerate(workers.pids))
    killed_before = num_killed()
    problem: RunError | None = None
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for exit_ in workers.exits():
            if running.pop(exit_.index, None) is None or (outlives and exit_.index != FEEDER):
                continue
            if exit_.status:
                problem = problem or explain_exit(exit_, killed_before)
            if exit_.status or outlives:
                deadline = min(deadline, time.monotonic() + grace_s)
    return problem


def explain_exit(exit_: WorkerExit, killed_before: int | None) -> RunError:
    """Return the error for an exit: out of memory if the system killed the process for that, else the signal."""
    if exit_.status != -signal.SIGKILL:
        return RunError(f"rank {exit_.index} {exit_}")
    killed = num_killed()
    if killed is None or killed_before is None or killed > killed_before:
        return OutOfMemory(f"rank {exit_.index} was killed because memory ran out; use a smaller batch or more stages")
    return RunError(f"rank {exit_.index} was killed by signal {signal.SIGKILL:d}")


def _run_in_lab(settings: FitSettings, plan: Plan | None, file: Path, lab: Lab) -> RunError | None:
    """Run one process per host of a lab; return the error that this process observed, if any."""
    hosts = [host.name for host in lab.spec.hosts]
    missing = [name for name in plan.devices if name not in hosts] if plan is not None else []
    if missing:
        raise UsageError(f"the plan uses {', '.join(missing)}; the lab has {', '.join(hosts)}; plan for this lab")
    given = settings.processes or settings.stages or settings.replicas or settings.cuts
    count = settings.num_processes if given else len(hosts)
    if count > len(hosts):
        raise UsageError(f"the lab has {len(hosts)} hosts for {count} processes; use fewer processes, or more hosts")

    def show(line: OutputLine) -> None:
        if line.stream == "stderr" and "hostname of the client socket" not in line.text:
            print_line(line)

    command, env = module_command(WORKER, str(file.resolve())), {"PYTHONPATH": module_path()}
    on = hosts[:count] if plan is None else plan.devices
    ends: EndTogether = "first" if settings.on_loss != "stop" else True
    with lab.start(command, on=on, env=env, output=show, end_together=ends) as run:
        try:
            codes = run.wait()
        except RunError as error:
            return error
    failed = [host for host, code in codes.items() if code and (ends is True or host == on[0])]
    return RunError(run.first_failure or f"{failed[0]} failed") if failed else None
