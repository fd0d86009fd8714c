# What lme4 finds on the pooled tables of tests/glm/mixed_tables.py:
#   python tests/glm/mixed_tables.py FOLDER && Rscript tests/glm/oracles/mixed.R FOLDER > tests/glm/oracles/mixed.json
# Needs R and lme4. lme4's own stopping rules are too loose for a comparison.

suppressMessages(library(lme4))
folder <- commandArgs(TRUE)[1]

general <- glmerControl(
    optimizer = "bobyqa", tolPwrss = 1e-12, optCtrl = list(rhobeg = 1e-2, rhoend = 1e-9, maxfun = 1e5),
    check.conv.singular = "ignore", check.conv.grad = "ignore", check.conv.hess = "ignore"
)
linear <- lmerControl(
    optimizer = "bobyqa", optCtrl = list(rhobeg = 1e-2, rhoend = 1e-12, maxfun = 1e5), check.conv.singular = "ignore",
    check.conv.grad = "ignore", check.conv.hess = "ignore"
)
numbers <- function(values) paste0("[", paste(sprintf("%.17g", values), collapse = ", "), "]")
figures <- function(fit, table) {
    effects <- ranef(fit, condVar = TRUE)$site
    at <- attr(effects, "postVar")
    sprintf(
        '{"estimate": %s, "se": %s, "covariance": %s, "sigma": %.17g, "loglik": %.17g, "digest": %.17g, "own": %s, "own_sd": %s}',
        numbers(fixef(fit)), numbers(sqrt(diag(as.matrix(vcov(fit))))), numbers(as.matrix(VarCorr(fit)$site)), sigma(fit),
        as.numeric(logLik(fit)), sum(table$y * seq_len(nrow(table))) + sum(table$x), numbers(as.matrix(effects)[1, ]),
        numbers(sqrt(diag(as.matrix(at[, , 1]))))
    )
}

files <- sort(list.files(folder, "\\.csv$"))
lines <- c()
for (file in files) {
    table <- read.csv(file.path(folder, file))
    name <- sub("\\.csv$", "", file)
    family <- sub("-.*", "", name)
    slopes <- length(strsplit(name, "-")[[1]]) == 4
    formula <- if (slopes) y ~ x + z + (1 + x | site) else y ~ x + z + (1 | site)
    fits <- list()
    if (family == "gaussian") {
        fits$reml <- lmer(formula, table, control = linear)
        fits$ml <- lmer(formula, table, REML = FALSE, control = linear)
        if (!slopes) fits$weighted <- lmer(formula, table, weights = w, control = linear)
        if (!slopes) fits$small <- lmer(y ~ x + (1 | site), table, REML = FALSE, control = linear)
    } else {
        fits$ml <- glmer(formula, table, family, nAGQ = if (slopes) 1 else 25, control = general)
        if (!slopes) fits$small <- glmer(y ~ x + (1 | site), table, family, nAGQ = 25, control = general)
    }
    for (kind in names(fits)) lines <- c(lines, sprintf('"%s %s": %s', name, kind, figures(fits[[kind]], table)))
}
cat(sprintf('{"R": "%s", "lme4": "%s",\n%s}\n', R.version.string, packageVersion("lme4"), paste(lines, collapse = ",\n")))
