# The tutorial's regression of the six tables in data/, which docs/tutorials/regression.md writes:
# Rscript fair.R, in the folder with data/, writes fair.txt (what R shows) and fair.json.

library(splines)

tables <- do.call(rbind, lapply(Sys.glob("data/*.csv"), read.csv))
fit <- glm(affair ~ age + yrs_married + rate_marriage + religious + work, binomial, tables)
capture.output(summary(fit), file = "fair.txt")

exact <- glm.control(epsilon = 1e-14, maxit = 100)
fit <- update(fit, control = exact)
curved <- update(fit, . ~ . - yrs_married + bs(yrs_married, knots = 6, Boundary.knots = c(0.5, 23)))
tested <- anova(fit, curved, test = "LRT")
stopifnot(fit$converged, curved$converged)

numbers <- function(values) paste0("[", paste(sprintf("%.17g", values), collapse = ", "), "]")
writeLines(sprintf(
    '{"R": "%s",\n"estimate": %s,\n"se": %s,\n"deviance": %.17g,\n"loglik": %.17g,\n"aic": %.17g,\n"spline": %s}',
    R.version.string, numbers(coef(fit)), numbers(sqrt(diag(vcov(fit)))), deviance(fit), logLik(fit), AIC(fit),
    numbers(c(tested$Df[2], tested$Deviance[2], tested$`Pr(>Chi)`[2]))
), "fair.json")
