"""What this package offers to an engine."""

from sagellm.core import Provider, hookimpl


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    kind, package = "lifetime_predictor", "sagellm.kvmgr.lifetime"
    return [
        Provider(
            kind,
            "statistical",
            f"{package}.statistical:StatisticalLifetimePredictor",
            "outputs to the same prefix, of the same prompt length, client, and all, by what has been right",
        ),
        Provider(
            kind,
            "lstm",
            f"{package}.learnt:LSTMLifetimePredictor",
            "statistical, and an LSTM that `sage llm predictor train` trains on a trace",
        ),
        Provider(
            kind,
            "transformer",
            f"{package}.learnt:TransformerLifetimePredictor",
            "statistical, and a transformer that `sage llm predictor train` trains on a trace",
        ),
        Provider(
            kind,
            "ranker",
            f"{package}.ranker:RankingLifetimePredictor",
            "statistical, and the order of outputs as learnt from words while serving",
        ),
        Provider(
            kind,
            "online",
            f"{package}.online:OnlineLifetimePredictor",
            "another predictor, corrected by its latest errors; forgets when lengths change",
        ),
    ]
