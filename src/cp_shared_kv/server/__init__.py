"""The OpenAI-compatible HTTP server. It knows the engine by `engine_client.EngineClient` only."""
