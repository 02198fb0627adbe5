// Shows the text of a Run Report in its node, and fills in the presets of a Sol Attention node.
// ComfyUI loads this file by itself; it is the only one.

import { app } from "../../scripts/app.js";
import { fillFromPreset, presetAfter } from "./lib/presets.mjs";
import { reportText, splitLocator } from "./lib/report.mjs";

const NODE = "HopperSolRunReport";
const WIDGET = "report";
const MIN_SIZE = [520, 440];

const STYLE = {
  width: "100%",
  height: "100%",
  boxSizing: "border-box",
  margin: "0",
  padding: "6px",
  border: "none",
  borderRadius: "4px",
  outline: "none",
  resize: "none",
  whiteSpace: "pre-wrap",
  font: "11px/1.4 ui-monospace, Menlo, Consolas, monospace",
  color: "var(--input-text, #ddd)",
  backgroundColor: "var(--comfy-input-bg, #222)",
};

// The box lies over the canvas: what it does not scroll with goes there, so that zooming still works
// and the browser does not zoom the page.
function zoomUnlessScrolling(event) {
  const scrolls = this.scrollHeight > this.clientHeight && !event.ctrlKey && !event.metaKey;
  if (scrolls || event.defaultPrevented) return;
  event.preventDefault();
  app.canvas.processMouseWheel(event);
}

function addReport(node) {
  const box = document.createElement("textarea");
  box.readOnly = true;
  box.spellcheck = false;
  box.placeholder = "The report appears here after a run.";
  box.setAttribute("aria-label", "Run report");
  box.dataset.captureWheel = "true"; // Nodes 2.0: once focused, the wheel scrolls the text
  box.addEventListener("wheel", zoomUnlessScrolling);
  Object.assign(box.style, STYLE);

  const widget = node.addDOMWidget(WIDGET, "HOPPER_SOL_REPORT", box, {
    serialize: false, // not an input of the prompt
    hideInPanel: true, // the side panel would take the element out of the node
    getMinHeight: () => 120,
    getValue: () => box.value,
    setValue: (text) => {
      box.value = text;
    },
  });
  widget.serialize = false; // not in the saved workflow, so no saved value shifts

  const [width, height] = node.size;
  node.setSize([Math.max(width, MIN_SIZE[0]), Math.max(height, MIN_SIZE[1])]);
}

function showReport(node, message) {
  const text = reportText(message);
  const widget = node.widgets?.find((candidate) => candidate.name === WIDGET);
  if (text !== null && widget) widget.value = text;
}

function nodeAt(locator) {
  const { subgraph, id } = splitLocator(locator);
  const root = app.rootGraph ?? app.graph;
  return (subgraph === null ? root : root.subgraphs?.get(subgraph))?.getNodeById(id);
}

app.registerExtension({
  name: "hopper_sol.run_report",

  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    addReport(node);
    const previous = node.onExecuted;
    node.onExecuted = function (message) {
      previous?.apply(this, arguments);
      showReport(this, message);
    };
  },

  // Outputs that come back without a run: another workflow tab, a job from the history.
  onNodeOutputsUpdated(outputs) {
    for (const [locator, output] of Object.entries(outputs)) {
      const node = nodeAt(locator);
      if (node?.comfyClass === NODE) showReport(node, output);
    }
  },
});

const ATTENTION = "HopperSolAttention";

// Call `react` with the new value after what a widget does itself when a person changes it. Loading
// a workflow writes values without that, so a saved preset never overwrites what was saved with it.
function onChange(widget, react) {
  const previous = widget.callback;
  widget.callback = function (value) {
    const result = previous?.apply(this, arguments);
    react(value);
    return result;
  };
}

app.registerExtension({
  name: "hopper_sol.presets",

  nodeCreated(node) {
    if (node.comfyClass !== ATTENTION) return;
    const preset = node.widgets?.find((widget) => widget.name === "preset");
    if (!preset) return;
    for (const widget of node.widgets) {
      if (widget === preset) continue;
      onChange(widget, (value) => {
        preset.value = presetAfter(preset.value, widget.name, value);
      });
    }
    onChange(preset, (name) => {
      fillFromPreset(node.widgets, name);
      node.setDirtyCanvas?.(true, true);
    });
  },
});
