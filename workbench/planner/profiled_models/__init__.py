"""Plans whose model is a layer profile: their stages, seconds and estimate."""
