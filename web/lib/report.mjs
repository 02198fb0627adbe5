// Pure helpers of the Run Report widget; no ComfyUI, no DOM.

/**
 * The text that an "executed" message carries, or null where it carries none: ComfyUI also sends
 * messages without any output. Several texts (one per list element) are set apart by a blank line.
 */
export function reportText(message) {
  const parts = [message?.text ?? []].flat();
  const texts = parts.filter((part) => typeof part === "string" && part.trim());
  return texts.length ? texts.join("\n\n") : null;
}

/**
 * The parts of a key of ComfyUI's node outputs: "8" is node 8 of the workflow itself,
 * "<uuid>:8" is node 8 of the subgraph with that id.
 */
export function splitLocator(locator) {
  const text = String(locator);
  const colon = text.lastIndexOf(":");
  return { subgraph: colon < 0 ? null : text.slice(0, colon), id: text.slice(colon + 1) };
}
