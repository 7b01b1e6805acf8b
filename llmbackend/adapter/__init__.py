"""The `llm` backend, modelled on MindIE's Triton backend. Start with backend.py.

In:   backend → model_instance_state (Execute) → request_conversion (schemas/, text/) → model_state → task_map
Out:  engine → model_instance_state (callbacks) → infer_task (text/output_assembler, schemas/) → response_sender
inside_triton/ runs the same backend in NVIDIA's own server.
"""
