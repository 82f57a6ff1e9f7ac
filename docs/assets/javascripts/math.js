// Formulas come as \( ... \) and \[ ... \] in elements of class "arithmatex"; KaTeX renders them here.
for (const element of document.querySelectorAll(".arithmatex")) {
  const source = element.textContent.trim()
  try {
    katex.render(source.slice(2, -2), element, {
      displayMode: source.startsWith("\\["),
      throwOnError: true,
    })
  } catch (error) {
    element.classList.add("broken-formula")
    console.error(`KaTeX: ${error.message}\n${source}`)
  }
}
