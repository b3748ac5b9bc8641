"""Find the operations of a program that read the weights of given layers."""

from collections.abc import Sequence

from penstock.graph.ops import CALLBACK, GETITEM, Op, resolve_operator
from penstock.graph.program import StageProgram


def operations_of(program: StageProgram, layers: Sequence[str]) -> set[str]:
    """Return the names of the operations that read weights of the given layers, which are module paths.

    Example:
        operations_of(program, ["blocks.3.mlp.fc2", "head"])
    """
    read = {
        state.value.name
        for state in program.states
        if any(state.source == layer or state.source.startswith(f"{layer}.") for layer in layers)
    }
    return {op.name for op in program.ops if read & set(op.uses())}


def is_in_place(op: Op) -> bool:
    """Return True if an operation may write to its arguments."""
    return op.target == CALLBACK or (op.target != GETITEM and resolve_operator(op.target)._schema.is_mutable)


def may_be_written(program: StageProgram) -> set[str]:
    """Return the names of values passed to in-place operations, whose rounded copies would become stale."""
    return {name for op in (*program.prelude, *program.ops) if is_in_place(op) for name in op.uses()}
