"""Settings: one TOML file < environment < flags."""
