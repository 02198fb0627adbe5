// The presets of the Sol Attention node; no ComfyUI, no DOM. The table is that of
// nodes/patching/presets.py, and a test of the pack compares the two.

export const CUSTOM = "custom";

// Written as JSON, so that the test can read it.
export const PRESETS = {
  "custom": {},
  "quality": {
    "tau": 0.5,
    "estimator": "auto",
    "precision": "bf16",
    "dense_steps": -1,
    "dense_last_steps": 1,
    "start_percent": 0.3,
    "end_percent": 1.0,
    "dense_layers": "0-1"
  },
  "balanced": {
    "tau": 1.0,
    "estimator": "auto",
    "precision": "auto",
    "dense_steps": -1,
    "dense_last_steps": 0,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "dense_layers": "auto"
  },
  "fast": {
    "tau": 1.5,
    "estimator": "auto",
    "precision": "auto",
    "dense_steps": -1,
    "dense_last_steps": 0,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "dense_layers": "auto"
  },
  "few-step 8": {
    "tau": 1.0,
    "estimator": "auto",
    "precision": "auto",
    "dense_steps": -1,
    "dense_last_steps": 0,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "dense_layers": "0-1"
  },
  "few-step 4": {
    "tau": 0.75,
    "estimator": "auto",
    "precision": "auto",
    "dense_steps": -1,
    "dense_last_steps": 0,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "dense_layers": "0-1"
  },
  "turbo-8": {
    "tau": 1.0,
    "estimator": "auto",
    "precision": "auto",
    "dense_steps": 2,
    "dense_last_steps": 1,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "dense_layers": "0-1"
  },
  "turbo-4": {
    "tau": 0.75,
    "estimator": "auto",
    "precision": "auto",
    "dense_steps": 1,
    "dense_last_steps": 1,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "dense_layers": "0-1"
  }
};

/**
 * Write the values of a preset into those of `widgets` that it fills; custom, and a preset of
 * another version, leave them all as they are.
 */
export function fillFromPreset(widgets, preset) {
  const values = PRESETS[preset] ?? {};
  for (const widget of widgets) {
    if (Object.hasOwn(values, widget.name)) widget.value = values[widget.name];
  }
}

/** The preset that is left once the widget called `name` holds `value`: the same one or custom. */
export function presetAfter(preset, name, value) {
  const values = PRESETS[preset] ?? {};
  return Object.hasOwn(values, name) && values[name] !== value ? CUSTOM : preset;
}
