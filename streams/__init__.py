"""The roles (verifier, embedder, ranker, monitor), their Kafka and backtest hosts, settings, command line."""
