"""The server of a federated regression on Flower."""

from collections.abc import Collection, Mapping
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.common.logger import log
from flwr.serverapp import Grid

from fedual.flower.identity import known_keys
from fedual.glm import result_folder
from fedual.glm.flower.exchange import Exchange
from fedual.glm.flower.sites import Patience, Sites
from fedual.glm.inference import check_level
from fedual.glm.models import estimate
from fedual.glm.options import settings_from
from fedual.glm.result import Fit
from fedual.glm.settings import Settings
from fedual.rundir.locking import in_use


class FederatedRegression:
    """`fedual.glm.fit` with sites on machines of their own; `start` runs it.

    All sites that take part answer all requests: the fit waits for a site that is away, and ends if one refuses.

    Args:
        settings: What is fitted, as in `fedual.glm.fit`.
        sites: The names of the sites that take part; without names, all that are connected, at least `min_sites`.
        min_sites: How many sites there must be.
        patience: How long to wait for them.
        out: The folder for the results, see `fedual.glm.result_folder`.
        level: Coverage of the intervals.
        robust: Standard errors: "none", "hc0" or "cluster".
        known: The public keys of all sites that may take part, as a mapping or a TOML file (`fedual flower key`).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        sites: Collection[str] = (),
        min_sites: int = 2,
        patience: Patience = Patience(),
        out: str | Path | None = None,
        level: float = 0.95,
        robust: str = "none",
        known: Mapping[str, str] | str | Path | None = None,
    ):
        check_level(level)
        result_folder.check_robust(robust)
        self.known = None if known is None else known_keys(known)
        self.settings, self.sites, self.min_sites, self.patience = settings, tuple(sites), min_sites, patience
        self.out, self.level, self.robust = None if out is None else Path(out), level, robust

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FederatedRegression":
        """The regression that a Flower app's configuration describes, as `fedual init --glm` writes it."""
        given = {key: value for key, value in config.items() if value != ""}
        return cls(
            settings_from(given),
            sites=str(given.get("sites", "")).replace(",", " ").split(),
            min_sites=given.get("min-sites", 2),
            patience=Patience(**{key: given[key] for key in ("wait", "timeout") if key in given}),
            out=given.get("out"),
            level=given.get("level", 0.95),
            robust=given.get("robust", "none"),
            known=given.get("known"),
        )

    def start(self, grid: Grid) -> Fit:
        """Fit; print the summary, and write the results.

        Raises:
            FedualError: Sites are missing, or one refused, or the data cannot be fitted; in one sentence.
        """
        with in_use(self.out):
            return self._start(grid)

    def _start(self, grid: Grid) -> Fit:
        sites = Sites(grid, self.sites, self.min_sites, self.patience, self.known)
        sites.gather()
        fit = estimate(lambda request: Exchange(sites, request).run(), self.settings)
        shown = result_folder.with_errors(fit, self.robust)
        print(shown.summary(self.level), flush=True)
        if self.out is not None:
            result_folder.write(shown, self.out, self.level)
            log(INFO, "the results are in %s", self.out.resolve())
        return shown
