"""Foundation and vertical models: features, training, export, bundles, inference runtime, evaluation."""
