# What R's glm() finds on a pooled table: Rscript pooled.R, in this folder, writes table.csv and pooled.json.
# Needs R and MASS. R's own stopping rule is too loose for a comparison: all fits go on to the last digit.

library(MASS)
library(splines)

set.seed(26)
n <- 240
site <- sample(c("north", "south", "east", "west"), n, replace = TRUE, prob = c(0.4, 0.3, 0.2, 0.1))
age <- round(rnorm(n, 50, 10), 1)
dose <- round(rexp(n, 0.5), 2)
sex <- sample(c("female", "male"), n, replace = TRUE)
stage <- sample(c("a", "b", "c"), n, replace = TRUE, prob = c(0.5, 0.3, 0.2))
grade <- sample(c(2, 4, 10), n, replace = TRUE)
time <- round(runif(n, 0.5, 3), 2)
f <- 0.03 * (age - 50) + 0.2 * dose + 0.5 * (sex == "male") - 0.4 * (stage == "c") + 0.2 * (grade == 10)
trials <- sample(5:12, n, replace = TRUE)
table <- data.frame(
    site, age, dose, sex, stage, grade, time, trials,
    weight = sample(1:4, n, replace = TRUE),
    pressure = round(120 + 5 * f + rnorm(n, 0, 3), 2),
    sick = rbinom(n, 1, plogis(f - 0.7)),
    successes = rbinom(n, trials, plogis(f - 0.5)),
    visits = rpois(n, time * exp(f / 2)),
    falls = rnbinom(n, size = 1.5, mu = exp(f)),
    cost = round(rgamma(n, shape = 3, rate = 3 / exp(f / 2 + 2)), 3)
)
table$height <- round(rnorm(n, 170, 8), 0)
table$height[sample(n, 25)] <- NA
write.csv(table, "table.csv", row.names = FALSE, quote = FALSE, na = "")
table <- read.csv("table.csv", stringsAsFactors = TRUE)

exact <- glm.control(epsilon = 1e-14, maxit = 100)
new <- head(na.omit(table), 5)

figures <- function(fit, dispersion = summary(fit)$dispersion) {
    if (is.null(dispersion)) dispersion <- summary(fit)$sigma^2
    null <- fit$null.deviance
    if (is.null(null)) null <- deviance(lm(model.response(fit$model) ~ 1, weights = fit$weights))
    list(
        coefficients = unname(coef(fit)), covariance = unname(vcov(fit)), dispersion = dispersion,
        deviance = deviance(fit), null_deviance = null, loglik = as.numeric(logLik(fit)), aic = AIC(fit),
        bic = BIC(fit), df_resid = df.residual(fit), n = nobs(fit),
        predicted = unname(predict(fit, new, type = "response"))
    )
}
general <- function(formula, family, weights = NULL) {
    fit <- do.call(glm, list(formula, family, quote(table), weights = weights, control = exact))
    stopifnot(fit$converged)
    figures(fit)
}

negative_binomial <- function() {
    fit <- glm.nb(falls ~ age + dose + sex, table, control = exact)
    x <- model.matrix(fit)
    loss <- function(theta) -sum(dnbinom(table$falls, size = theta[5], mu = exp(x %*% theta[1:4]), log = TRUE))
    joint <- solve(optimHess(c(coef(fit), fit$theta), loss, control = list(ndeps = rep(1e-4, 5))))
    c(figures(fit), list(theta = fit$theta, theta_se = fit$SE.theta, joint_se = unname(sqrt(diag(joint)))))
}

fits <- list(
    gaussian = figures(lm(pressure ~ age + sex + stage, table)),
    gaussian_weights = figures(lm(pressure ~ age + dose, table, weights = weight)),
    gaussian_log = general(pressure ~ age + sex, gaussian("log")),
    gaussian_missing = figures(lm(pressure ~ age + height, table)),
    logit_interaction = general(sick ~ age * sex + stage, binomial),
    logit_classes = general(sex ~ age + dose, binomial),
    logit_trials = general(cbind(successes, trials - successes) ~ age + dose + sex, binomial),
    logit_weights = general(sick ~ age + dose, binomial, quote(weight)),
    logit_number_factor = general(sick ~ age + factor(grade), binomial),
    logit_base = general(sick ~ age + relevel(stage, "b"), binomial),
    logit_no_intercept = general(sick ~ 0 + stage + age, binomial),
    logit_nested = general(sick ~ sex / stage + dose, binomial),
    probit = general(sick ~ age + dose + sex, binomial("probit")),
    cloglog = general(sick ~ age + dose + sex, binomial("cloglog")),
    poisson_offset = general(visits ~ age + dose + sex + offset(log(time)), poisson),
    poisson_weights = general(visits ~ age + log(time), poisson, quote(weight)),
    poisson_sqrt = general(visits ~ age + I(dose^2), poisson("sqrt")),
    gamma_log = general(cost ~ age + dose + sex, Gamma("log")),
    gamma_inverse = general(cost ~ age + dose, Gamma("inverse")),
    negative_binomial = negative_binomial(),
    splines = general(sick ~ bs(age, knots = c(45, 55), Boundary.knots = c(15, 85)) + sex, binomial),
    polynomial = general(sick ~ poly(age, 2) + scale(dose), binomial)
)

smaller <- glm(sick ~ age, binomial, table, control = exact)
larger <- glm(sick ~ age + dose + stage, binomial, table, control = exact)
likelihood <- anova(smaller, larger, test = "LRT")
straight <- glm(sick ~ age, binomial, table, control = exact)
curved <- glm(sick ~ bs(age, knots = c(45, 55), Boundary.knots = c(15, 85)), binomial, table, control = exact)
spline <- anova(straight, curved, test = "LRT")
short <- glm(cost ~ age, Gamma("log"), table, control = exact)
long <- glm(cost ~ age + dose + stage, Gamma("log"), table, control = exact)
f_test <- anova(short, long, test = "F")
link <- predict(larger, new, se.fit = TRUE)
mean <- predict(larger, new, type = "response", se.fit = TRUE)
normal <- lm(pressure ~ age + sex, table)

content <- list(
    R = R.version.string, MASS = as.character(packageVersion("MASS")), fits = fits,
    anova = list(
        likelihood = list(df = likelihood$Df[2], statistic = likelihood$Deviance[2], p = likelihood$`Pr(>Chi)`[2]),
        spline = list(df = spline$Df[2], statistic = spline$Deviance[2], p = spline$`Pr(>Chi)`[2]),
        f = list(df = f_test$Df[2], statistic = f_test$F[2], p = f_test$`Pr(>F)`[2])
    ),
    predict = list(
        link = list(fit = unname(link$fit), se = unname(link$se.fit)),
        mean = list(fit = unname(mean$fit), se = unname(mean$se.fit)),
        confidence = unname(predict(normal, new, interval = "confidence", level = 0.9)),
        prediction = unname(predict(normal, new, interval = "prediction", level = 0.9))
    )
)

json <- function(value) {
    if (is.list(value)) {
        return(paste0("{", paste0('"', names(value), '": ', sapply(value, json), collapse = ",\n"), "}"))
    }
    if (is.matrix(value)) return(paste0("[", paste(apply(value, 1, json), collapse = ", "), "]"))
    shown <- if (is.character(value)) paste0('"', value, '"') else sprintf("%.17g", value)
    if (length(value) == 1) shown else paste0("[", paste(shown, collapse = ", "), "]")
}
writeLines(json(content), "pooled.json")
