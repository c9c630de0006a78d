"""`predictor train` and `predictor score`: lifetime predictors on recorded traffic."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sagellm.core import LifetimePredictorProtocol, PluginRegistry, ProviderSpec
from sagellm.engines.cli.names import complete_providers
from sagellm.engines.cli.output import columns, print_json
from sagellm.engines.cli.targets import check_targets
from sagellm.engines.progress import progress_bar
from sagellm.lab.cli.flags import AsJSON, Overwrite, Reader, Source

if TYPE_CHECKING:
    from sagellm.core.protocols.lifetime import TrainingEpoch
    from sagellm.lab.simulation.predictor_scores import PredictorFigures

_KIND = "lifetime_predictor"

Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .svg, .png or .pdf.")]

train_app = typer.Typer(add_completion=False, rich_markup_mode=None)
score_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@train_app.command()
def train(  # noqa: PLR0913  (flags)
    trace: Source,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The weights to write.")],
    *,
    predictor: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The predictor to train.", autocompletion=complete_providers(_KIND)
        ),
    ] = "transformer",
    epochs: Annotated[int, typer.Option(min=1, max=10_000, help="Passes over the trace.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="The same seed trains the same weights.")] = 0,
    whole: Annotated[
        bool, typer.Option("--whole", help="Learn from the whole trace, and keep nothing to score.")
    ] = False,
    reader: Reader = None,
    plot: Plot = None,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Train a lifetime predictor on the first 70 % of a trace, and score it on the rest.

    It sees of each request what was known when it arrived. Serve with what it learnt by
    --lifetime-predictor 'NAME{weights=FILE}'.
    """
    from sagellm.engines.whole_file import whole_file
    from sagellm.lab.plots import check_plot, plot_training
    from sagellm.lab.simulation.predictor_scores import controls, examples_of, score_predictor
    from sagellm.lab.traces import read_trace

    check_plot(plot)
    check_targets(path, overwrite=overwrite, source=trace)
    registry = PluginRegistry.load()
    target: Any = registry.resolve(_KIND, predictor)
    requests = read_trace(trace, name=reader)
    questions = examples_of(requests, whole=whole)
    beside = [] if whole else controls(requests)
    history: list[TrainingEpoch] = []
    with progress_bar("training", total=epochs, unit="epochs") as advance:

        def tell(epoch: TrainingEpoch) -> None:
            history.append(epoch)
            advance(1)

        examples = [(each.request, each.actual_length) for each in questions]
        with whole_file(path) as partial:
            target.train(examples, partial, num_epochs=epochs, seed=seed, tell=tell)
    figures: list[PredictorFigures] = []
    if not whole:
        spec = ProviderSpec(predictor, {"weights": str(path)})
        with progress_bar("scoring", total=len(requests), unit="requests") as advance:
            trained: LifetimePredictorProtocol = registry.make(_KIND, spec)
            figures = [score_predictor(predictor, trained, requests, advance), *beside]
    if plot is not None:
        plot_training(plot, history, title=f"{predictor} on {trace.name}")
    if as_json:
        print_json(
            {
                "weights": str(path),
                "num_examples": len(examples),
                "epochs": [each._asdict() for each in history],
                "predictors": [asdict(each) for each in figures],
            }
        )
        return
    best = min(history, key=lambda each: each.held_back_loss)
    typer.echo(
        f"{path}: {len(examples):,} requests, best after {best.epoch} of {len(history)} epochs: mean error "
        f"{best.held_back_mae:.1f} tokens on the last of them, which it was not trained on"
    )
    if figures:
        typer.echo(f"\n{table_of(figures)}")


@score_app.command()
def score(
    trace: Source,
    *,
    predictor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A predictor, with options as NAME{option=value}; repeat it. [default: all installed]",
            autocompletion=complete_providers(_KIND),
        ),
    ] = None,
    reader: Reader = None,
    plot: Plot = None,
    as_json: AsJSON = False,
) -> None:
    """Score lifetime predictors on the last 30 % of a trace, beside what needs no predictor.

    Each is asked about every request with what was known when it arrived, and learns from each that ended.
    """
    from sagellm.lab.plots import check_plot, plot_calibration
    from sagellm.lab.simulation.predictor_scores import controls, score_predictor
    from sagellm.lab.traces import read_trace

    check_plot(plot)
    registry = PluginRegistry.load()
    installed = [entry.provider.name for entry in registry.providers(_KIND)]
    specs = [ProviderSpec.of(each) for each in predictor or installed if each != "null"]
    requests = read_trace(trace, name=reader)
    made = {spec.text: registry.make(_KIND, spec) for spec in specs}
    found = controls(requests)
    with progress_bar("scoring", total=len(made) * len(requests), unit="requests") as advance:
        found += [score_predictor(name, each, requests, advance) for name, each in made.items()]
    if plot is not None:
        plot_calibration(plot, found, title=trace.name)
    if as_json:
        print_json({"trace": str(trace), "predictors": [asdict(each) for each in found]})
    else:
        typer.echo(table_of(found))


def table_of(figures: list[PredictorFigures]) -> str:
    """Return a table of scores."""
    heads = ("PREDICTOR", "MAE, TOKENS", "WITHIN 10 %", "RANK CORR.", "80 % INTERVAL HOLDS", "CONFIDENCE")
    rows = [
        (
            each.name,
            f"{each.mae_tokens:.1f}",
            f"{each.within_10_percent:.1%}",
            "" if each.rank_correlation is None else f"{each.rank_correlation:.2f}",
            "" if each.coverage is None else f"{each.coverage:.1%}",
            "" if each.mean_confidence is None else f"{each.mean_confidence:.2f}",
        )
        for each in figures
    ]
    return columns(heads, rows)
