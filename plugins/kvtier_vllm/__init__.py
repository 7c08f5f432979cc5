"""kvtier for vLLM: a KV connector that saves whole blocks to the daemon and loads them from it."""

NAME = "KvtierConnector"


def register() -> None:
    """Register the connector by its name. vLLM calls this in each process, sometimes twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvtier_vllm.connector", NAME)
