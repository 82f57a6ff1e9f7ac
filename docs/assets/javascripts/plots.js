// Makes every <div class="plot" data-plot="NAME"> one with sliders. plots/NAME.js says what is drawn:
//   x        {label, log}                      the horizontal axis, shared by all panels
//   panels   {KEY: "label"}                    one plot each, side by side
//   sliders  {KEY: {label, min, max, step, value, log, integer}}   log: the slider moves the exponent of 10
//   lines    {LABEL: {slider: value}}          the curves of the static picture
//   curves   ({slider: value}) => {x: [...], KEY: {"series": [...]}}
// A panel shows the lines of the static picture and, thicker, those of the sliders. Where this script does
// not run the picture in the element stays.
import uPlot from "../uplot/uPlot.esm.js"

const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3]]

const color = (name) => getComputedStyle(document.body).getPropertyValue(name).trim()
const lines = () => ["--plot-1", "--plot-2", "--plot-3", "--plot-4"].map(color)
const format = (value) => String(Number(value.toPrecision(3)))

// The axis begins and ends at a round number, so that a tick is there.
function round(low, high) {
  const unit = 10 ** Math.floor(Math.log10(high - low)) / 10
  const slack = (high - low) / 100
  const ends = [Math.floor((low + slack) / unit), Math.ceil((high - slack) / unit)]
  return ends.map((end) => Number((end * unit).toPrecision(12)))
}

// The input counts positions, so that both ends and the first value are exactly those declared.
function slider(name, { label, min, max, step, value, log, integer }, changed) {
  const row = document.createElement("label")
  const input = document.createElement("input")
  const output = document.createElement("output")
  const positions = log ? 200 : Math.round((max - min) / step)
  const at = (position) => {
    if (position === 0 || position === positions) return position ? max : min
    const share = position / positions
    const number = log ? min * (max / min) ** share : min + (max - min) * share
    return integer ? Math.round(number) : Number(number.toPrecision(12))
  }
  const share = log ? Math.log(value / min) / Math.log(max / min) : (value - min) / (max - min)
  let number = value
  Object.assign(input, { type: "range", name, min: 0, max: positions, step: 1 })
  input.value = Math.round(share * positions)
  const show = () => (output.textContent = integer ? number : format(number))
  input.addEventListener("input", () => {
    number = at(input.valueAsNumber)
    show()
    changed()
  })
  row.append(Object.assign(document.createElement("span"), { textContent: label }), input, output)
  show()
  return { row, read: () => number }
}

// The kept curves of a panel: name, values and the number that gives colour and dashes.
function kept(drawn, key) {
  const found = Object.entries(drawn.lines).flatMap(([label, settings]) =>
    Object.entries(drawn.curves(settings)[key]).map(([series, values]) => ({
      name: [series, label].filter(Boolean).join(", "),
      values,
    })),
  )
  return found.map((curve, number) => ({ ...curve, number: number % 4 }))
}

// Where no pointer is over a plot, its legend has the values three quarters along.
function showValues(plot) {
  plot.setLegend({ idx: plot.legend.idx ?? Math.floor((3 * plot.data[0].length) / 4) }, false)
}

async function upgrade(element) {
  const drawn = await import(`./plots/${element.dataset.plot}.js`)
  const reads = {}
  const controls = Object.assign(document.createElement("div"), { className: "plot-controls" })
  const stage = Object.assign(document.createElement("div"), { className: "plot-stage" })
  const settings = () => Object.fromEntries(Object.entries(reads).map(([name, read]) => [name, read()]))
  let plots = []
  const redraw = () => {
    const result = drawn.curves(settings())
    for (const { key, plot, beside } of plots) {
      plot.setData([result.x, ...beside, ...Object.values(result[key])])
      showValues(plot)
    }
  }
  for (const [name, options] of Object.entries(drawn.sliders)) {
    const { row, read } = slider(name, options, redraw)
    reads[name] = read
    controls.append(row)
  }
  const alone = Object.keys(drawn.lines).length === 1 // its curves differ by series, not by setting
  element.append(controls, stage)

  const build = () => {
    for (const { plot } of plots) plot.destroy()
    stage.replaceChildren()
    const panels = Object.keys(drawn.panels).map(() =>
      Object.assign(document.createElement("div"), { className: "plot-panel" }),
    )
    stage.append(...panels) // all of them before one is measured: they share the width
    plots = Object.entries(drawn.panels).map(([key, label], i) => {
      const panel = panels[i]
      const result = drawn.curves(settings())
      const names = Object.keys(result[key])
      const others = kept(drawn, key)
      const strokes = lines()
      const text = color("--md-typeset-color")
      const grid = color("--plot-grid")
      const axis = (options) => ({
        stroke: text,
        grid: { stroke: grid, width: 1 },
        ticks: { stroke: grid, width: 1 },
        font: "12px system-ui, sans-serif",
        labelFont: "13px system-ui, sans-serif",
        ...options,
      })
      const options = {
        title: label,
        width: panel.clientWidth,
        height: 260,
        pxAlign: 0, // a line that follows whole pixels is a staircase
        padding: [8, 14, 0, 0],
        cursor: { drag: { x: false, y: false } },
        hooks: { setLegend: [showValues] },
        scales: {
          x: {
            time: false,
            distr: drawn.x.log ? 3 : 1,
            // A logarithmic axis would go on to the next power of 10.
            range: (_, low, high) => (drawn.x.log ? [low, high] : round(low, high)),
          },
        },
        axes: [axis({ label: drawn.x.label }), axis({ size: 56 })],
        series: [
          { label: drawn.x.label, value: (_, v) => (v == null ? "" : format(v)) },
          ...others.map(({ name, number }) => ({
            label: alone ? `${name || label}, at first` : name,
            stroke: alone ? `${strokes[number]}77` : strokes[number],
            width: 1.5,
            dash: DASHES[number],
            pxAlign: 0,
            points: { show: false },
            value: (_, v) => (v == null ? "" : format(v)),
          })),
          ...names.map((name, i) => ({
            label: alone ? name || label : [name, "sliders"].filter(Boolean).join(", "),
            stroke: alone ? strokes[i] : text,
            width: 2.6,
            dash: DASHES[alone ? i : i % 2],
            pxAlign: 0,
            points: { show: false },
            value: (_, v) => (v == null ? "" : format(v)),
          })),
        ],
      }
      const beside = others.map(({ values }) => values)
      const data = [result.x, ...beside, ...Object.values(result[key])]
      return { key, beside, plot: new uPlot(options, data, panel) }
    })
    for (const { plot } of plots) showValues(plot)
    element.plots = Object.fromEntries(plots.map(({ key, plot }) => [key, plot]))
  }
  element.classList.add("plot-live")
  build()
  let width = stage.clientWidth
  new ResizeObserver(() => {
    if (stage.clientWidth !== width) {
      width = stage.clientWidth
      for (const { plot } of plots)
        plot.setSize({ width: plot.root.parentElement.clientWidth, height: 260 })
    }
  }).observe(stage)
  // Another palette: other colours.
  new MutationObserver(build).observe(document.body, { attributeFilter: ["data-md-color-scheme"] })
}

for (const element of document.querySelectorAll(".plot[data-plot]"))
  upgrade(element).catch((error) => console.error(`plot ${element.dataset.plot}: ${error.message}`))
