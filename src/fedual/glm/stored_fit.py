"""What the file of a fit must hold: its checksum says that it is whole, not that its author was honest."""

from fedual.forms import ANY, Number, Row, Whole

REAL = Number(finite=False)
"""A number, NaN or ±∞: figures that do not exist are NaN."""
COUNT = Whole(-(2**53), 2**53)
ESTIMATE = {"coefficients": [REAL], "covariance": [[REAL]]}
SITE = {
    "name": str,
    "n": COUNT,
    "missing": {...: COUNT},
    "mean_response": REAL,
    "gradient": (None, [REAL]),
    "hessian": (None, [[REAL]]),
    "events?": (None, COUNT),
}
SCHEMA = {
    "formula": str,
    "kinds": {...: ("numeric", "boolean", "categorical")},
    "levels": {...: [str]},
    "states": {...: {...: ANY}},
    "terms": [str],
    **dict.fromkeys(("weights", "offset", "trials", "event"), (None, str)),
    "categorical": [str],
}
COMPONENTS = {
    "terms": [str],
    "covariance": [[REAL]],
    "se": [REAL],
    **dict.fromkeys(("statistic", "icc"), REAL),
    "df": COUNT,
    "scale": str,
    "restricted": bool,
    "prior_scale": (None, REAL),
    "posterior": (None, Row(REAL, REAL)),
}
TEST = {"chi2": REAL, "df": COUNT, "p": REAL}
SURVIVAL = {
    "baseline": ("stratified", "piecewise"),
    "ties": ("efron", "breslow"),
    "events": COUNT,
    "strata": [str],
    "null_score": TEST,
    "concordance": Row(REAL, REAL, REAL),
    "means": [REAL],
    "transform": ("identity", "log", "none"),
    "trends": [TEST],
    "cuts": [Number(0.0)],
    "log_hazards": (None, [REAL]),
    "joint": (None, [[REAL]]),
    "events_by_piece": (None, [REAL]),
}
FIT = {
    "schema": SCHEMA,
    "family": str,
    "link": str,
    "n": Whole(1),
    **dict.fromkeys(("parameters", "df_model", "df_resid"), COUNT),
    **dict.fromkeys(("dispersion", "loglik", "null_loglik", "deviance", "null_deviance", "pearson"), REAL),
    "sites": [SITE],
    "site_effects": ("pooled", "fixed", "random"),
    "ml": (None, ESTIMATE),
    "posterior": (None, ESTIMATE),
    "prior": {
        "sd": (None, REAL),
        "intercept_sd": (None, REAL),
        "terms": {...: Row(REAL, (None, REAL))},
        "site_sd?": REAL,
    },
    "posterior_kind": ("quadratic", "laplace", "variational", "integrated"),
    "covariance_kind": ("model", "hc0", "cluster"),
    "hc0": (None, [[REAL]]),
    "alpha": (None, REAL),
    "alpha_se": (None, REAL),
    "convergence": {
        "converged": bool,
        "rounds": COUNT,
        "step": REAL,
        "tolerance": REAL,
        "history": [{"kind?": str, "loss?": (None, REAL), "step_se?": (None, REAL)}],
    },
    "separation": (None, str),
    "aliased": [str],
    "residuals": (None, {"edges": [REAL], "counts": [REAL]}),
    "calibration": (None, [{"predicted": REAL, "observed": REAL, "n": REAL}]),
    "warnings": [str],
    "components?": (None, COMPONENTS),
    "survival?": (None, SURVIVAL),
}
