"""A federated regression on Flower: every site runs `client`, the server runs `server`."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedual.glm.flower import FederatedRegression, client_app

client = client_app()  # each SuperNode's --node-config names its table and its guards
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    FederatedRegression.from_config(context.run_config).start(grid)
