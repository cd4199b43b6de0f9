// Colours and fonts of the page, so that charts follow the light and the dark theme.

function themeConfig(element) {
  const style = getComputedStyle(element);
  const read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  const text = read("--jp-ui-font-color1", "#333");
  const quiet = read("--jp-ui-font-color2", "#666");
  const faint = read("--jp-border-color2", "#ddd");
  const words = { labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" };
  return {
    font: read("--jp-ui-font-family", "system-ui, sans-serif"),
    background: null,
    padding: 2,
    view: { stroke: null },
    axis: { labelColor: quiet, titleColor: quiet, gridColor: faint, domainColor: faint, tickColor: faint, ...words },
    legend: { labelColor: text, titleColor: text, ...words },
    text: { color: text },
  };
}

function watchTheme(onChange) {
  const observer = new MutationObserver(onChange);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  return () => observer.disconnect();
}
