"""kvtier for vLLM: a KV connector that saves whole blocks with the daemon and loads them from it."""

NAME = "KvtierConnector"


def register() -> None:
    """Make the connector known to vLLM by its name. It calls this in each of its processes, perhaps twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvtier_vllm.connector", NAME)
