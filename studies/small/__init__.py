"""Small and noisy tables: the method without a setting beside FedAvg, FedProx and FedDyn."""
