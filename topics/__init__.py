"""The bus: event types, codecs, topic contracts, admin, log readers, simulator, replay, dead letters, brokers."""
