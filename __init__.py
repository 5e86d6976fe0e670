"""stackrl: one YAML file declares a whole reinforcement-learning run of a language model."""
