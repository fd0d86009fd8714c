"""MLflow: a run in an experiment, in a local database or on a server."""

import time

from fedual.errors import InputError
from fedual.runs.packages import load
from fedual.runs.run import Run
from fedual.trackers.base import Backend, Figures, Tracker, parameters, recall, remember


def mlflow(experiment: str = "fedual", uri: str | None = None) -> Tracker:
    """Log a run's config as parameters and its figures as metrics.

    Args:
        experiment: Made where it is not there yet.
        uri: Of a server or a database (sqlite:///runs.db); None for what MLflow itself is set to.

    Raises:
        InputError: MLflow is missing, or, when the run starts, cannot use the URI.
    """
    package = load("fedual.trackers.mlflow", "mlflow", "mlflow")

    def open(run: Run) -> Backend:
        try:
            client = package.MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(experiment)
            group = found.experiment_id if found else client.create_experiment(experiment)
        except package.MlflowException as error:
            raise InputError(f"MLflow cannot use uri = {uri!r} ({error}): try sqlite:///mlflow.db.") from None
        name, last = recall(run, "mlflow"), 0
        try:
            if name:
                client.update_run(name, status="RUNNING")
        except package.MlflowException:
            name = None  # another database than before
        if name:
            last = max((metric.step for metric in client.get_metric_history(name, "norm")), default=0)
        else:
            name = client.create_run(group, run_name=run.path.name if run.path else None).info.run_id
            given = parameters(run.config).items()
            client.log_batch(name, params=[package.entities.Param(key, str(value)) for key, value in given])
            remember(run, "mlflow", name)

        def log(figures: Figures, round: int) -> None:
            now = int(1000 * time.time())
            metrics = [package.entities.Metric(key, value, now, round) for key, value in figures.items()]
            client.log_batch(name, metrics=metrics)

        return Backend(last, log, lambda failed: client.set_terminated(name, "FAILED" if failed else "FINISHED"))

    return Tracker(open)
