// Run by tests/unit/test_web.py with `node --test`.

import assert from "node:assert/strict";
import { test } from "node:test";

import { reportText, splitLocator } from "../../web/lib/report.mjs";

test("reportText takes the text of an executed message", () => {
  assert.equal(reportText({ text: ["a\nb"], json: ["{}"], images: [] }), "a\nb");
});

test("reportText joins the texts of several executions", () => {
  assert.equal(reportText({ text: ["first", "second"] }), "first\n\nsecond");
});

test("reportText accepts a bare string", () => {
  assert.equal(reportText({ text: "alone" }), "alone");
});

test("reportText finds nothing in messages without text", () => {
  for (const message of [null, undefined, {}, { text: null }, { text: [] }, { text: [" "] }]) {
    assert.equal(reportText(message), null);
  }
});

test("reportText passes over what is no text", () => {
  assert.equal(reportText({ text: [null, 3, { a: 1 }, "kept"] }), "kept");
});

test("splitLocator of a node of the workflow itself", () => {
  assert.deepEqual(splitLocator("8"), { subgraph: null, id: "8" });
  assert.deepEqual(splitLocator(8), { subgraph: null, id: "8" });
});

test("splitLocator of a node in a subgraph", () => {
  const uuid = "8fbba6f7-4fb1-4c0c-9295-c1480a9ec78b";
  assert.deepEqual(splitLocator(`${uuid}:8`), { subgraph: uuid, id: "8" });
});
