"""The study of bindings and queues: experiments, scripts, journal, evidence, recommendations."""
