"""How requests of nodes become patches on a cloned ComfyUI model."""
