# What R's survival package finds: Rscript survival.R, in this folder, writes survival.csv and survival.json.
# Needs R and survival. rossi.csv is that of fedual.glm.survival.data.

library(survival)

set.seed(29)
n <- 360
site <- sample(c("north", "south", "west"), n, replace = TRUE, prob = c(0.5, 0.3, 0.2))
age <- round(rnorm(n, 60, 10), 1)
dose <- round(rexp(n, 0.5), 2)
sex <- sample(c("female", "male"), n, replace = TRUE)
stage <- sample(c("a", "b", "c"), n, replace = TRUE, prob = c(0.5, 0.3, 0.2))
f <- 0.04 * (age - 60) + 0.2 * dose + 0.5 * (stage == "c") + 0.3 * (site == "west")
death <- rweibull(n, 1.4, 30 * exp(-f / 1.4))
entry <- ifelse(runif(n) < 0.5, 0, floor(runif(n, 0, 12)))
lost <- runif(n, 10, 50)
time <- pmax(ceiling(pmin(death, lost)), entry + 1)
table <- data.frame(
    site, age, dose, sex, stage, entry, time,
    status = as.integer(death <= lost), code = 1 + (death <= lost), weight = sample(1:4, n, replace = TRUE) / 2,
    shift = round(rnorm(n, 0, 0.3), 2)
)
table$height <- round(rnorm(n, 170, 8), 0)
table$height[sample(n, 30)] <- NA
write.csv(table, "survival.csv", row.names = FALSE, quote = FALSE, na = "")
table <- read.csv("survival.csv", stringsAsFactors = TRUE)

rossi <- read.csv("../../../src/fedual/glm/survival/rossi.csv")
rossi$site <- (seq_len(nrow(rossi)) - 1) %% 4
rossi$prison <- rep(c("ashby", "brook", "carlow"), c(190, 140, 102))

exact <- coxph.control(eps = 1e-12, toler.chol = 1e-14, iter.max = 50, toler.inf = 1e-10)

tests <- function(fit, transform) cox.zph(fit, transform = transform, terms = FALSE)$table[, c("chisq", "df", "p")]

figures <- function(formula, data = table, ties = "efron", ...) {
    data$row <- seq_len(nrow(data))
    given <- list(formula, data = data, ties = ties, control = exact, ...)
    fit <- do.call(coxph, given)
    rows <- do.call(coxph, c(given, list(cluster = quote(row))))
    c <- concordance(fit)
    naive <- if (is.null(fit$naive.var)) fit$var else fit$naive.var  # R has robust errors with weights
    list(
        coefficients = unname(coef(fit)), covariance = unname(naive), hc0 = unname(vcov(rows)),
        loglik = fit$loglik[2], null_loglik = fit$loglik[1], score = fit$score, wald = unname(fit$wald.test),
        n = fit$n, events = fit$nevent, aic = AIC(fit), bic = BIC(fit),
        concordance = as.numeric(c$concordance),
        identity = unname(tests(fit, "identity")), log = unname(tests(fit, "log"))
    )
}

cases <- list(
    plain = figures(Surv(time, status) ~ age + dose + sex + stage + strata(site)),
    breslow = figures(Surv(time, status) ~ age + dose + sex + stage + strata(site), ties = "breslow"),
    strata = figures(Surv(time, status) ~ age + dose + stage + strata(site) + strata(sex)),
    truncated = figures(Surv(entry, time, status) ~ age + dose + stage + strata(site)),
    truncated_breslow = figures(Surv(entry, time, status) ~ age + dose + stage + strata(site), ties = "breslow"),
    weights = figures(Surv(time, status) ~ age + dose + strata(site), weights = quote(weight)),
    weights_breslow = figures(Surv(time, status) ~ age + dose + strata(site), weights = quote(weight), ties = "breslow"),
    offset = figures(Surv(time, status) ~ age + dose + offset(shift) + strata(site)),
    missing = figures(Surv(time, status) ~ age + height + strata(site)),
    code = figures(Surv(time, code) ~ age * sex + strata(site)),
    tutorial = figures(Surv(week, arrest) ~ fin + age + wexp + prio + strata(prison), rossi),
    rossi = figures(Surv(week, arrest) ~ fin + age + race + wexp + mar + paro + prio + strata(site), rossi)
)

# curves of the stratum "north" for three new rows; vartype and ties as the fit has them
curves <- function(formula, ties) {
    fit <- do.call(coxph, list(formula, data = table, ties = ties, control = exact))
    new <- data.frame(age = c(50, 60, 70), dose = c(0.5, 2, 4), site = "north")
    at <- summary(survfit(fit, newdata = new, conf.type = "log"), times = c(5, 15, 30), extend = TRUE)
    list(survival = unname(at$surv), se = unname(at$std.err), lower = unname(at$lower), upper = unname(at$upper),
         lp = unname(predict(fit, new, type = "lp", reference = "zero")))
}

found <- list(
    versions = list(R = R.version.string, survival = as.character(packageVersion("survival"))),
    fits = cases,
    cluster = unname(vcov(coxph(Surv(time, status) ~ age + dose + strata(site), table, control = exact, cluster = site))),
    curves = list(
        efron = curves(Surv(time, status) ~ age + dose + strata(site), "efron"),
        breslow = curves(Surv(time, status) ~ age + dose + strata(site), "breslow"),
        truncated = curves(Surv(entry, time, status) ~ age + dose + strata(site), "efron")
    )
)

json <- function(x) {
    if (is.list(x)) return(paste0("{", paste0("\"", names(x), "\": ", vapply(x, json, ""), collapse = ",\n"), "}"))
    if (is.character(x)) return(paste0("\"", x, "\""))
    if (is.matrix(x)) return(paste0("[", paste(apply(x, 1, function(row) json(unname(row))), collapse = ", "), "]"))
    shown <- ifelse(is.na(x), "null", formatC(x, digits = 17, format = "g"))
    if (length(x) == 1) trimws(shown) else paste0("[", paste(trimws(shown), collapse = ", "), "]")
}
writeLines(json(found), "survival.json")
