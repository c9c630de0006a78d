"""The lifetime predictor by itself: short prompts get short answers, and it finds out."""

from sagellm.core import Randomness, SequenceId
from sagellm.kvmgr.lifetime import PredictionRequest, StatisticalLifetimePredictor


def main() -> None:
    rng = Randomness(seed=0).stream("lifetime example")
    predictor = StatisticalLifetimePredictor()

    for index in range(400):
        num_tokens = rng.choice([50, 2000])
        sequence_id = SequenceId(f"request-{index}")
        predictor.predict(PredictionRequest(sequence_id=sequence_id, token_ids=range(num_tokens)))
        length = max(1, round(rng.gauss(40, 2) if num_tokens == 50 else rng.gauss(300, 80)))
        predictor.update(sequence_id=sequence_id, actual_length=length, actual_time=0.02 * length)

    print("prompt  generated  remaining      time  confidence")
    for num_tokens, current_length in ((50, 0), (50, 30), (2000, 0), (2000, 250), (2000, 400)):
        request = PredictionRequest(
            sequence_id=SequenceId("new"),
            token_ids=range(num_tokens),
            current_length=current_length,
            max_length=1000,
        )
        answer = predictor.predict(request)
        print(
            f"{num_tokens:6}  {current_length:9}  {answer.remaining_length:9.1f}  "
            f"{answer.estimated_time:6.2f} s  {answer.confidence:10.2f}"
        )
    metrics = predictor.metrics()
    print(
        f"mean error {metrics.mae_tokens:.1f} tokens, of the best constant {metrics.median_mae_tokens:.1f}; "
        f"{metrics.within_10_percent:.0%} within 10 %, of {metrics.num_scored} predictions"
    )


if __name__ == "__main__":
    main()
