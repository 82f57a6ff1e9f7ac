// A text of n tokens, each active at x, all others silent. Of the k largest activations min(k, n) are x and the rest 0;
// with token counts only min(k, n) of them are asked for.
export const x = { label: "activation of each of the text's tokens" }
export const panels = { value: "loss of the text", gradient: "gradient by that activation" }
export const sliders = {
  top_k: { label: "top_k", min: 1, max: 20, step: 1, value: 5, integer: true },
  tokens: { label: "tokens of the text", min: 1, max: 20, step: 1, value: 3, integer: true },
  threshold: { label: "threshold", min: 0.1, max: 1.5, step: 0.05, value: 0.5 },
}
export const lines = {
  "": { tokens: 3, top_k: 5, threshold: 0.5 },
}

export function curves({ tokens, top_k, threshold }) {
  const xs = Array.from({ length: 200 }, (_, i) => 0.00317 + i * 0.01)
  const share = Math.min(top_k, tokens) / top_k
  const loss = (slope) => xs.map((h) => Math.max(0, threshold - slope * h))
  const pull = (slope) => xs.map((h) => (threshold > slope * h ? -slope : 0))
  return {
    x: xs,
    value: { "without token counts": loss(share), "with token counts": loss(1) },
    gradient: { "without token counts": pull(share), "with token counts": pull(1) },
  }
}
