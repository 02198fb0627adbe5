// Run by tests/unit/test_web.py with `node --test`.

import assert from "node:assert/strict";
import { test } from "node:test";

import { CUSTOM, PRESETS, fillFromPreset, presetAfter } from "../../web/lib/presets.mjs";

const widgets = () => [
  { name: "preset", value: "custom" },
  { name: "tau", value: 0.3 },
  { name: "dense_layers", value: "none" },
  { name: "min_tokens", value: 0 },
];
const values = (list) => Object.fromEntries(list.map(({ name, value }) => [name, value]));

test("fillFromPreset writes what the preset fills and nothing else", () => {
  const filled = widgets();
  fillFromPreset(filled, "quality");
  assert.deepEqual(values(filled), {
    preset: "custom", tau: 0.5, dense_layers: "0-1", min_tokens: 0,
  });
});

test("fillFromPreset leaves everything alone for custom and for unknown presets", () => {
  for (const preset of [CUSTOM, "of a later version", "toString", undefined]) {
    const filled = widgets();
    fillFromPreset(filled, preset);
    assert.deepEqual(filled, widgets());
  }
});

test("presetAfter is custom once a filled value differs", () => {
  assert.equal(presetAfter("fast", "tau", 1.4), CUSTOM);
  assert.equal(presetAfter("fast", "dense_layers", "0"), CUSTOM);
});

test("presetAfter keeps the preset for its own value and for other inputs", () => {
  assert.equal(presetAfter("fast", "tau", 1.5), "fast");
  assert.equal(presetAfter("fast", "min_tokens", 64), "fast");
  assert.equal(presetAfter(CUSTOM, "tau", 7), CUSTOM);
  assert.equal(presetAfter("fast", "toString", 1), "fast");
});

test("every preset but custom fills the same inputs", () => {
  const { custom, ...named } = PRESETS;
  assert.deepEqual(custom, {});
  const inputs = Object.values(named).map((preset) => Object.keys(preset).join());
  assert.equal(new Set(inputs).size, 1);
});
