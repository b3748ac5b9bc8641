"""Epochs made by hand, and any that a policy might meet."""

from collections.abc import Sequence

from hypothesis import strategies as st

from penstock.elastic.epochs import EpochRecord, FreezePolicy, next_frozen


def epochs(
    *norms: Sequence[float],
    frozen: Sequence[int] = (),
    accuracy: Sequence[float | None] = (),
    loss: Sequence[float | None] = (),
) -> list[EpochRecord]:
    """An epoch for each row of norms; what is given beside them is by epoch."""
    return [
        EpochRecord(
            epoch=at, frozen_layers=frozen[at] if frozen else 0, gradient_norms=tuple(row),
            accuracy=accuracy[at] if accuracy else None, loss=loss[at] if loss else None,
        )
        for at, row in enumerate(norms)
    ]  # fmt: skip


def validated(
    frozen: Sequence[int], accuracy: Sequence[float | None] = (), loss: Sequence[float | None] = ()
) -> list[EpochRecord]:
    """Epochs of twelve layers of which only the validation matters."""
    return epochs(*[[1.0] * 12] * len(frozen), frozen=frozen, accuracy=accuracy, loss=loss)


def follow(policy: FreezePolicy, rows: Sequence[Sequence[float]], num_layers: int) -> list[int]:
    """What a policy freezes before each epoch and after the last one, where it is obeyed."""
    history: list[EpochRecord] = []
    frozen = [next_frozen(policy, history, num_layers)]
    for at, row in enumerate(rows):
        norms = tuple(0.0 if layer < frozen[-1] else norm for layer, norm in enumerate(row))
        history.append(EpochRecord(epoch=at, frozen_layers=frozen[-1], gradient_norms=norms))
        frozen.append(next_frozen(policy, history, num_layers))
    return frozen


# a share of layers, as a policy takes it
alphas = st.one_of(
    st.floats(1e-3, 1, exclude_max=True), st.fractions(min_value="1/50", max_value="49/50", max_denominator=50)
)


@st.composite
def trainings(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    """Gradient norms of some epochs, some of them not finite, and the number of layers."""
    num_layers = draw(st.integers(1, 16))
    norm = st.one_of(st.floats(0, 1e3), st.sampled_from([0.0, 1.0, float("inf"), float("nan")]))
    row = st.lists(norm, min_size=num_layers, max_size=num_layers)
    return draw(st.lists(row, max_size=8)), num_layers
