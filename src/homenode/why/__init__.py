"""why: what a paste of outputs, files and messages shows, put together and judged as one."""
